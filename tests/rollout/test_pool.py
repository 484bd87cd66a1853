"""The pool of replicas: real engines in threads, killed, fenced, removed and added under load; the tokens are always
those of one engine alone."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output
from rlctl.rollout.pool import ReplicaPool
from rlctl.rollout.seats import ReplicaChange
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError
from tests.rollout.pooled import MODEL, alone, continued, drain, replicas
from tests.rollout.tiny import VOCAB, make_engine, make_requests
from tests.waiting import until


def test_requests_are_spread_and_come_back_once() -> None:
    requests = make_requests(24, seed=1)
    with replicas("a", "b", "c", pause=0.001) as made:
        pool = ReplicaPool(made)
        pool.submit(requests)
        assert pool.num_running == 24
        with pytest.raises(UsageError, match="in flight already"):
            pool.submit(requests[:1])
        assert drain(pool, requests) == alone(requests)
        assert pool.step(0.0) == []
        stats = pool.stats()
        assert stats.requests == {"a": 0, "b": 0, "c": 0}
        assert (stats.waiting, stats.resubmitted, stats.late_outputs, stats.tokens) == (0, 0, 0, {})
        assert [len(replica.taken) for replica in made] == [8, 8, 8]


def test_a_request_that_a_replica_refuses_is_not_taken() -> None:
    (bad,) = make_requests(1, seed=2)
    good = make_requests(6, seed=3)
    bad = replace(bad, key=RequestKey(99, 0), prompt_ids=(1,) * 256)
    with replicas("a", "b") as made:
        pool = ReplicaPool(made)
        with pytest.raises(UsageError, match="256 prompt tokens"):
            pool.submit([bad, *good])
        pool.abort()
        assert bad.key not in {output.key for output in pool.step(0.5)}
        until(lambda: pool.num_running == 0 or pool.step(0.5))
        pool.submit(good)
        assert drain(pool, good) == alone(good)


@pytest.mark.parametrize("told_every", [1, 4, 1000])
def test_what_a_killed_replica_had_goes_on_elsewhere(told_every: int) -> None:
    requests = make_requests(30, seed=4, longest=40)
    changes: list[ReplicaChange] = []
    with replicas("a", "b", progress_ticks=told_every, pause=0.001) as (a, b):
        pool = ReplicaPool([a, b], on_change=changes.append)
        a.stall(10)
        pool.submit(requests)
        a.until_stalled()
        a.kill()
        assert drain(pool, requests) == alone(requests)
        stats = pool.stats()
        (lost,) = [change for change in changes if change.change == "lost"]
        assert (lost.replica, lost.why, lost.moved) == ("a", "SIGKILL", stats.resubmitted)
        assert stats.resubmitted > 0
        assert (stats.tokens_kept > 0) == (told_every < 1000)
        assert stats.tokens_read_again >= stats.tokens_kept
        # Nothing is made again that was known: the other one got it as a prefix.
        again = [request for request in b.taken if request.prefix]
        assert sum(len(s.token_ids) for request in again for s in request.prefix) <= stats.tokens_kept


def test_a_response_that_was_whole_when_its_replica_died_is_not_begun_again() -> None:
    requests = make_requests(8, seed=5, longest=4)
    whole = alone(requests)
    with replicas("a", "b", lockstep=True) as (a, b):  # nobody decodes
        pool = ReplicaPool([a, b])
        pool.submit(requests)
        at_b = {request.key for request in b.taken}
        engine = make_engine(MODEL, replica="a")
        had = {request.key: request for request in a.taken}
        a.unfinished = lambda: [continued(had[o.key], o) for o in engine.generate(a.taken)]  # type: ignore[method-assign]
        a._on_failed(RlctlError("SIGKILL"))
        ended = pool.step(0.0)
        assert {output.key: output.token_ids for output in ended} == {k: v for k, v in whole.items() if k not in at_b}
        assert {output.finish_reason for output in ended} == {"length"}
        assert len(b.taken) == len(at_b)


def test_a_request_that_replicas_die_of_is_not_sent_to_all_of_them() -> None:
    requests = make_requests(4, seed=50)
    deadly = replace(requests[0], key=RequestKey(99, 0), prompt_ids=(VOCAB,))  # looked at when it is to be decoded
    changes: list[ReplicaChange] = []
    names = [f"r{index}" for index in range(8)]
    with replicas(*names, pause=0.001) as made:
        pool = ReplicaPool(made, on_change=changes.append, patience=30)
        pool.submit([deadly])
        with pytest.raises(RlctlError, match=r"each with request \(99, 0, 0\) before it made a token of it"):
            until(lambda: pool.step(0.5))
        lost = [change for change in changes if change.change == "lost"]
        assert len(lost) == 5
        assert "outside 0 .. 66" in lost[0].why
        pool.abort([deadly.key])
        assert [(output.key, output.finish_reason) for output in pool.step(0.0)] == [(deadly.key, "abort")]
        pool.submit(requests)
        assert drain(pool, requests) == alone(requests)


def test_late_outputs_change_nothing() -> None:
    requests = make_requests(12, seed=6, longest=40)
    with replicas("a", "b", pause=0.001) as (a, b):
        pool = ReplicaPool([a, b])
        a.stall(0)
        pool.submit(requests)
        had = list(a.taken)
        a.kill()
        until(lambda: pool.stats().requests["a"] == 0)  # the pool has been told
        a.late([Output(request.key, [], "length") for request in had])
        assert drain(pool, requests) == alone(requests)
        assert pool.stats().late_outputs == len(had) == 6
        b.late([Output(RequestKey(77, 0), [], "stop")])
        assert pool.stats().late_outputs == 7
        assert pool.step(0.0) == []


def test_requests_wait_until_a_replica_serves_and_then_are_spread() -> None:
    requests = make_requests(20, seed=9)
    with replicas("a", "b", serving=False) as made:
        pool = ReplicaPool(made)
        pool.submit(requests)
        assert pool.stats().waiting == 20
        with pool.syncing():
            for replica in made:
                replica.resume(0, Deadline(5))
                assert pool.step(0.01) == []
        assert drain(pool, requests) == alone(requests)
        assert [len(replica.taken) for replica in made] == [10, 10]


def test_conversations_stay_with_their_replica() -> None:
    turns = [make_requests(9, seed=20 + turn, samples=3) for turn in range(3)]
    with replicas("a", "b") as made:
        pool = ReplicaPool(made)
        for turn, requests in enumerate(turns):
            now = [replace(r, key=r.key._replace(turn=turn)) for r in random.Random(turn).sample(requests, 9)]
            pool.submit(now)
            drain(pool, now)
        homes = [{request.key[:2] for request in replica.taken} for replica in made]
        assert not homes[0] & homes[1]
        assert min(len(home) for home in homes) >= 4
        assert pool.stats().stickiness_breaks == 0


def test_aborted_requests_come_out_and_go_on() -> None:
    requests = make_requests(12, seed=30, longest=40)
    with replicas("a", "b", pause=0.002) as made:
        pool = ReplicaPool(made)
        for replica in made:
            replica.stall(5)
        pool.submit(requests)
        for replica in made:
            replica.until_stalled()
        pool.abort([requests[3].key, RequestKey(1000, 0)])
        first = pool.step(0.0)
        assert requests[3].key in {output.key for output in first}
        pool.abort()
        outputs = [*first, *pool.step(0.0)]
        assert sorted(output.key for output in outputs) == [request.key for request in requests]
        assert pool.num_running == 0
        cut = [output for output in outputs if output.finish_reason == "abort"]
        done = {output.key: output.token_ids for output in outputs if output.finish_reason != "abort"}
        assert cut
        for replica in made:
            replica.go_on()
        pool.submit([continued(requests[output.key.ordinal], output) for output in cut])
        assert {**done, **drain(pool, requests)} == alone(requests)


def test_an_evaluation_runs_beside_the_pump() -> None:
    training = make_requests(20, seed=31, longest=40)
    held_out = [replace(r, key=RequestKey(-1 - r.key.ordinal, 0)) for r in make_requests(12, seed=32, temperature=0.0)]
    with replicas("a", "b", pause=0.001) as (a, b):
        pool = ReplicaPool([a, b])
        pool.submit(training)
        found: list[Output] = []
        evaluation = threading.Thread(target=lambda: found.extend(pool.generate(held_out, timeout=60)))
        evaluation.start()
        until(lambda: len(a.taken) + len(b.taken) == 32)
        a.kill()
        assert drain(pool, training) == alone(training)
        evaluation.join(60)
        assert [output.key for output in found] == [request.key for request in held_out]
        assert {output.key: output.token_ids for output in found} == alone(held_out)


def test_an_evaluation_out_of_time_leaves_nothing_behind() -> None:
    requests = make_requests(4, seed=33, longest=40)
    with replicas("a", pause=0.05) as (a,):
        pool = ReplicaPool([a])
        with pytest.raises(DeadlineError, match="waiting for 4 of 4 responses"):
            pool.generate([replace(r, params=replace(r.params, max_new_tokens=60)) for r in requests], timeout=0.1)
        until(lambda: pool.stats().requests == {"a": 0})
        assert pool.num_running == 0
        assert len(a.unfinished()) == 0
        assert pool.step(0.0) == []


def test_time_counts_as_decoding_while_a_replica_that_serves_has_requests() -> None:
    requests = make_requests(8, seed=21, longest=40)
    with replicas("a", "b", pause=0.001) as (a, b):
        pool = ReplicaPool([a, b])
        a.stall(3)
        pool.take_time()
        begin = time.monotonic()
        pool.submit(requests)
        a.until_stalled()
        until(lambda: (pool.step(0.1), pool.stats().requests["b"] == 0)[1])
        waited = time.monotonic() - begin
        decoding, there = pool.take_time()
        assert there == pytest.approx(2 * waited, abs=0.2)
        assert 0 < decoding <= there
        time.sleep(0.2)  # a has requests and serves, b has none
        decoding, there = pool.take_time()
        assert decoding == pytest.approx(there / 2, rel=0.05)
        a.kill()
        drain(pool, requests)
        pool.take_time()
        time.sleep(0.2)
        decoding, there = pool.take_time()
        assert decoding == 0.0
        assert 0.15 < there < 60
