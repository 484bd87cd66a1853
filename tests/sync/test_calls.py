"""Calls in threads: each in one that has nothing else to do, which is used again, and keeps nothing of what is over."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import Future

import pytest

from rlctl.sync import calls
from rlctl.sync.calls import call, error_of


class Thing:
    """Can be looked for after it is gone."""


def test_results_and_errors_are_handed_over() -> None:
    assert call(lambda: 7, "seven").result(5) == 7
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 / 0, "error").result(5)
    assert isinstance(call(lambda: exit(3), "exit").exception(5), SystemExit)


def test_one_that_never_returns_holds_up_nobody() -> None:
    end = threading.Event()
    stuck = [call(lambda: end.wait(30), "stuck") for _ in range(20)]
    for number in range(50):
        assert call(lambda n=number: n, "another").result(5) == number  # type: ignore[misc]
    assert not any(future.done() for future in stuck)
    end.set()
    assert all(future.result(5) for future in stuck)


def test_calls_one_after_the_other_are_made_by_one_thread() -> None:
    call(lambda: None, "first").result(5)
    found = {call(threading.get_ident, "ident").result(5) for _ in range(50)}
    assert len(found) == 1
    assert call(lambda: threading.current_thread().name, "named").result(5) == "rlctl-named"
    assert call(lambda: threading.current_thread().daemon, "daemon").result(5)


def test_many_at_once_each_have_a_thread_and_few_of_them_stay() -> None:
    together = threading.Barrier(60)
    before = threading.active_count()
    futures = [call(lambda: together.wait(20), "together") for _ in range(60)]
    assert sorted(future.result(20) for future in futures) == list(range(60))
    for _ in range(500):
        if threading.active_count() <= before + calls._MOST_IDLE:
            break
        time.sleep(0.01)
    assert threading.active_count() <= before + calls._MOST_IDLE
    for number in range(200):  # none that has ended is asked
        assert call(lambda n=number: n, "after").result(5) == number  # type: ignore[misc]


def test_nothing_of_a_call_that_is_over_is_kept() -> None:
    given, made = Thing(), Thing()
    seen = [weakref.ref(given), weakref.ref(made)]

    def work(thing: Thing = given, result: list[Thing] = [made]) -> Thing:  # noqa: B006
        return result.pop()

    def failing(thing: Thing) -> None:
        raise ValueError(thing)

    call(work, "work").result(5)
    error = Thing()
    seen.append(weakref.ref(error))
    call(lambda thing=error: failing(thing), "error").exception(5)  # type: ignore[misc]
    del given, made, work, error
    for _ in range(100):
        gc.collect()
        if not any(ref() for ref in seen):
            return
        time.sleep(0.01)
    raise AssertionError([ref() for ref in seen])


def test_a_forked_process_has_threads_of_its_own() -> None:
    call(lambda: None, "before").result(5)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(call(lambda: 42, "child").result(10))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42


def test_a_signal_that_comes_just_before_the_wait_is_handled_in_it() -> None:
    done: list[Future[None]] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: done[-1].set_result(None))
    try:
        for _ in range(200):
            done.append(Future())
            call(lambda: os.kill(os.getpid(), signal.SIGUSR1), "signal")
            assert error_of(done[-1]) is None
    finally:
        signal.signal(signal.SIGUSR1, before)
