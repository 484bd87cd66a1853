"""The pool in lockstep: what ends, and after which step, does not depend on threads."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from rlctl.errors import RlctlError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request
from rlctl.rollout.pool import ReplicaPool
from rlctl.rollout.seats import ReplicaChange
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError
from tests.rollout.thread_replicas import ThreadReplica
from tests.rollout.tiny import FUSED, finish, make_engine, make_model, make_requests

MODEL = make_model(FUSED["qwen2"], seed=81)
Stream = list[list[tuple[RequestKey, list[int], str, list[tuple[int, str, int]]]]]


class Uneven(ThreadReplica):
    """A replica whose steps take a random time."""

    def tick(self, deadline: Deadline) -> list[Output]:
        time.sleep(random.random() * 0.002)
        outputs = super().tick(deadline)
        time.sleep(random.random() * 0.002)
        return outputs


class Stuck(ThreadReplica):
    """A replica that hangs in its fifth step."""

    ticks = 0

    def tick(self, deadline: Deadline) -> list[Output]:
        self.ticks += 1
        if self.ticks >= 5:
            raise DeadlineError("one decode step: no answer within 1 s")
        return super().tick(deadline)


MADE: list[ThreadReplica] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No thread outlives its test."""
    yield
    while MADE:
        MADE.pop().close()


def lockstep(
    *names: str, kind: Callable[..., ThreadReplica] = ThreadReplica, max_slots: int = 4
) -> list[ThreadReplica]:
    made = [kind(MODEL, name, lockstep=True, max_slots=max_slots) for name in names]
    MADE.extend(made)
    return made


def described(outputs: list[Output]) -> list[tuple[RequestKey, list[int], str, list[tuple[int, str, int]]]]:
    return [
        (o.key, o.token_ids, o.finish_reason, [(s.version, s.replica, len(s.token_ids)) for s in o.segments])
        for o in outputs
    ]


def drive(pool: ReplicaPool, requests: list[Request]) -> Stream:
    """Submit in three portions, with an evaluation and a removal between; return what each step gave."""
    stream: Stream = []
    by_key = {request.key: request for request in requests}

    def steps(count: int) -> None:
        for _ in range(count):
            outputs = pool.step()
            stream.append(described(outputs))
            pool.submit(
                [replace(by_key[o.key], prefix=tuple(o.segments)) for o in outputs if o.finish_reason == "abort"]
            )

    pool.submit(requests[:10])
    steps(7)
    pool.submit(requests[10:20])
    steps(3)
    held_out = [replace(request, key=RequestKey(-1 - i, 0)) for i, request in enumerate(requests[:4])]
    stream.append(described(pool.generate(held_out)))
    pool.remove("b", "abort")
    pool.abort([requests[11].key])
    pool.submit(requests[20:])
    steps(2)
    pool.remove("c", "wait")
    while pool.num_running:
        steps(1)
    return stream


def test_two_pools_give_equal_streams_whatever_the_threads_do() -> None:
    requests = make_requests(30, seed=1, longest=20)
    even = drive(ReplicaPool(lockstep("a", "b", "c"), deterministic=True), requests)
    pool = ReplicaPool(lockstep("c", "b", "a", kind=Uneven), deterministic=True)
    assert drive(pool, requests) == even
    pool.close()
    engine = make_engine(MODEL)
    engine.submit(requests)
    whole = {output.key: output.token_ids for output in finish(engine)}
    ended = [one for step in even for one in step if one[2] != "abort" and one[0].ordinal >= 0]
    assert {key: tokens for key, tokens, _, _ in ended} == whole
    assert len(ended) == len(whole)
    assert all(step == sorted(step) for step in even[:7])
    assert {replica for _, _, _, segments in ended for _, replica, _ in segments} == {"a", "b", "c"}


def test_one_step_is_one_token_of_each_running_request() -> None:
    requests = [
        replace(r, params=replace(r.params, max_new_tokens=5 + i)) for i, r in enumerate(make_requests(8, seed=2))
    ]
    pool = ReplicaPool(lockstep("a", "b", max_slots=8), deterministic=True)
    pool.submit(requests)
    ended = [[output.key.ordinal for output in pool.step()] for _ in range(12)]
    assert ended == [[]] * 4 + [[i] for i in range(8)]


def test_aborted_outputs_come_with_the_next_step() -> None:
    requests = make_requests(6, seed=3, longest=20)
    requests = [replace(r, params=replace(r.params, max_new_tokens=20)) for r in requests]
    pool = ReplicaPool(lockstep("a", "b"), deterministic=True)
    pool.submit(requests)
    pool.step()
    pool.abort()
    ended = pool.step()
    assert [(output.key.ordinal, output.finish_reason) for output in ended] == [(i, "abort") for i in range(6)]
    assert pool.num_running == 0


@pytest.mark.parametrize("how", ["killed", "stuck"])
def test_a_replica_lost_in_lockstep(how: str) -> None:
    requests = make_requests(16, seed=4, longest=20)
    changes: list[ReplicaChange] = []
    (a,), (b,) = lockstep("a", kind=Stuck if how == "stuck" else ThreadReplica), lockstep("b")
    pool = ReplicaPool([a, b], deterministic=True, on_change=changes.append)
    pool.submit(requests)
    ended: list[Output] = []
    for step in range(200):
        if step == 4 and how == "killed":
            a.kill()
        ended += pool.step(0.0)
    assert pool.num_running == 0
    engine = make_engine(MODEL)
    engine.submit(requests)
    assert {o.key: o.token_ids for o in ended} == {o.key: o.token_ids for o in finish(engine)}
    assert len(ended) == 16
    (lost,) = [change for change in changes if change.change == "lost"]
    assert lost.why == {"killed": "SIGKILL", "stuck": "one decode step: no answer within 1 s"}[how]
    if how == "stuck":  # it seems to serve, and is not trusted until somebody replaces it
        pool.replace(*lockstep("a"))
        again = [replace(request, key=request.key._replace(ordinal=request.key.ordinal + 20)) for request in requests]
        pool.submit(again)
        assert pool.stats().requests["a"] > 0


def test_one_that_died_and_serves_again_is_another_stay_of_the_same_name() -> None:
    first, second = make_requests(8, seed=6), make_requests(16, seed=7)
    second = [replace(request, key=request.key._replace(ordinal=request.key.ordinal + 100)) for request in second]
    changes: list[ReplicaChange] = []
    a, b = lockstep("a", "b")
    pool = ReplicaPool([a, b], deterministic=True, on_change=changes.append)
    pool.submit(first)
    had = pool.stats().requests["a"]
    assert had > 0
    a.faint("its node is gone")
    while pool.num_running:
        pool.step()
    a.come_to()
    a.late([Output(first[0].key, [], "length")])  # whom it told before does not listen for this stay
    pool.submit(second)
    assert pool.stats().requests["a"] == len(a.taken) - had > 0
    while pool.num_running:
        pool.step()
    assert [change.change for change in changes if change.replica == "a"] == [
        "joined", "serving", "lost", "joined", "serving",
    ]  # fmt: skip
    assert pool.stats().late_outputs == 1


def test_with_all_stopped_a_step_waits_and_then_fails() -> None:
    requests = make_requests(4, seed=5, longest=20)
    made = lockstep("a", "b")
    pool = ReplicaPool(made, deterministic=True, patience=0.3)
    pool.submit(requests)
    with pool.syncing():
        for replica in made:
            replica.interrupt("keep", 0, Deadline(5))
        begin = time.monotonic()
        assert [pool.step(0.05) for _ in range(10)] == [[]] * 10
        assert time.monotonic() - begin > 0.4
    with pytest.raises(RlctlError, match="no replica has served for 300 ms"):
        for _ in range(100):
            pool.submit(
                [replace(requests[output.key.ordinal], prefix=tuple(output.segments)) for output in pool.step(0.05)]
            )
    for replica in made:
        replica.resume(0, Deadline(5))
    while pool.num_running:
        pool.step()
