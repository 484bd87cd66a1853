"""Answers that are fetched by whoever waits for them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from rlctl.process import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError, MemberLostError
from rlctl.sync.owed import Owed, fetched
from rlctl.sync.waiting import gather
from tests.sync.squad import Pool, Squad

Pair = tuple[Channel, Channel]
SEAT = {"timeout": 60.0, "rank": 1, "world": 2}


@pytest.fixture
def channels() -> Iterator[list[Pair]]:
    made = [(Channel(a), Channel(b)) for a, b in (socket.socketpair() for _ in range(2))]
    yield made
    for pair in made:
        for channel in pair:
            channel.close()


def owed(pair: Pair, fetch: Callable[[], Any] | None = None, seconds: float = 20.0) -> Owed:
    patience = Deadline(seconds)
    return Owed(pair[0], patience, fetch or (lambda: pair[0].receive(patience.remaining)), "an answer")


def test_all_are_fetched_by_who_gathers_them(channels: list[Pair]) -> None:
    by: list[threading.Thread] = []

    def noted(pair: Pair) -> Owed:
        return owed(pair, lambda: (by.append(threading.current_thread()), pair[0].receive(20.0))[1])

    answers = {number: noted(pair) for number, pair in enumerate(channels)}
    for number, (_, there) in enumerate(channels):
        there.send(f"answer {number}", 1.0)
    found = gather(answers, Deadline(20.0), "asking")
    assert found.results == {0: "answer 0", 1: "answer 1"}
    assert by == [threading.current_thread()] * 2


def test_one_that_is_here_is_not_held_up_by_another(channels: list[Pair]) -> None:
    errors: list[int] = []
    answers = {number: owed(pair, seconds=1.0) for number, pair in enumerate(channels)}

    def refuse() -> None:
        raise DeadlineError("no")

    answers[1]._fetch = refuse
    channels[1][1].send("", 1.0)
    begin = time.monotonic()
    found = gather(answers, Deadline(0.5), "asking", on_error=errors.append)
    assert errors[0] == 1 and isinstance(found.errors[1], DeadlineError)
    assert 0.9 < time.monotonic() - begin < 5
    assert isinstance(found.errors[0], (DeadlineError, MemberLostError)) or "TimeoutError" in str(found.errors[0])


@pytest.mark.parametrize("way", ["wait", "callback", "result", "timeout", "among others"])
def test_it_is_fetched_however_it_is_waited_for(channels: list[Pair], way: str) -> None:
    one = owed(channels[0])
    channels[0][1].send("here", 1.0)
    called: list[Future[Any]] = []
    if way == "callback":
        one.add_done_callback(called.append)
        wait([one], 20.0)
        assert called == [one]
    elif way == "wait":
        assert fetched([one], Deadline(20.0)) == [one]
    elif way == "among others":
        other: Future[Any] = Future()
        assert fetched([one, other], Deadline(20.0)) == []
        wait([one], 20.0)
    assert one.result(20.0 if way == "timeout" else None) == "here"
    assert one.exception() is None and one.claimed


def test_what_a_thread_was_asked_to_fetch_is_not_waited_for_as_well(
    channels: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the thread gets to it late: it takes the answer, and who waits for the channel would wait in vain."""
    late: list[Callable[[], Any]] = []
    monkeypatch.setattr("rlctl.sync.owed.call", lambda function, _: late.append(function))
    one = owed(channels[0])
    one.fetch_beside()
    assert one.claimed
    channels[0][1].send("here", 1.0)
    assert fetched([one], Deadline(0.0)) == []
    late[0]()
    assert one.result() == "here"


def test_ctrl_c_is_not_an_answer(channels: list[Pair]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    channels[0][1].send("", 1.0)
    with pytest.raises(KeyboardInterrupt):
        gather({0: owed(channels[0], interrupted)}, Deadline(20.0), "asking")


def test_an_answer_that_nobody_waits_for_holds_nothing_up(pool: Pool) -> None:
    group = Squad(pool, "gloo", 1, 1).trainers
    for _ in range(3):
        group.start("served", {0: {}}, Deadline(20.0))
    served = group.ask("served", Deadline(20.0))
    assert [group.members[0].ask("served", {}, Deadline(20.0))] == served


def test_a_member_that_is_stopped_is_told_of_in_time_and_one_that_is_gone_is_started_again(pool: Pool) -> None:
    group = Squad(pool, "gloo", 1, 2).rollouts
    os.kill(group.members[0].pid, signal.SIGSTOP)
    begin = time.monotonic()
    found = gather(group.start("served", {0: {}, 1: {}}, Deadline(1.0)), Deadline(1.0), "asking")
    assert time.monotonic() - begin < 2.5
    assert found.errors.keys() == {0} and found.results.keys() == {1}
    group.open(60.0)  # it was killed
    starts = group.members[1].starts
    os.kill(group.members[1].pid, signal.SIGKILL)
    found = gather(group.start("prepare", {1: SEAT}, Deadline(60.0)), Deadline(60.0), "asking")
    assert found.results.keys() == {1} and group.members[1].starts == starts + 1
