"""The pool of replicas: real engines in threads, killed, fenced, removed and added under load; the tokens are always
those of one engine alone."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request
from rlctl.rollout.pool import ReplicaPool
from rlctl.rollout.seats import ReplicaChange
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError
from tests.rollout.thread_replicas import ThreadReplica
from tests.rollout.tiny import FUSED, VOCAB, finish, make_engine, make_model, make_requests
from tests.waiting import until

MODEL = make_model(FUSED["qwen2"], seed=80)
Tokens = dict[RequestKey, list[int]]


def alone(requests: list[Request]) -> Tokens:
    """Return what one engine makes of them."""
    engine = make_engine(MODEL)
    engine.submit(requests)
    return {output.key: output.token_ids for output in finish(engine)}


@contextmanager
def replicas(*names: str, **more: Any) -> Iterator[list[ThreadReplica]]:
    made = [ThreadReplica(MODEL, name, **more) for name in names]
    try:
        yield made
    finally:
        for replica in made:
            replica.close()


def drain(pool: ReplicaPool, requests: list[Request]) -> Tokens:
    """Step until everything ended; what was aborted is sent again, as a rollouter does. Nothing comes twice."""
    by_key = {request.key: request for request in requests}
    tokens: Tokens = {}
    limit = time.monotonic() + 60
    while pool.num_running:
        assert time.monotonic() < limit
        for output in pool.step(0.5):
            assert output.key not in tokens
            if output.finish_reason == "abort":
                pool.submit([continued(by_key[output.key], output)])
            else:
                tokens[output.key] = output.token_ids
                assert len(output.token_ids) <= by_key[output.key].params.max_new_tokens
    return tokens


def continued(request: Request, output: Output) -> Request:
    return replace(request, prefix=tuple(output.segments))


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


def test_without_a_replica_the_pool_fails_and_names_each() -> None:
    requests = make_requests(4, seed=10)
    with replicas("a", "b") as (a, b), replicas("c", serving=False) as (c,):
        pool = ReplicaPool([a, b, c], patience=0.3)
        until(lambda: pool.step(0.0) == [] and pool.stats().waiting == 0)
        a.kill("SIGKILL")
        b.fence("a sync left it with half the weights")
        begin = time.monotonic()
        with pytest.raises(RlctlError, match=r"a: SIGKILL; b: it was fenced.*; c: its weights have not come"):
            pool.submit(requests)
            drain(pool, requests)
        assert 0.25 < time.monotonic() - begin < 10
        assert re.search(
            r"4 requests wait for a replica; 0 at a, lost \(SIGKILL\); 0 at b, fenced \(.*\); 0 at c, new \(",
            pool.describe(),
        )
        with pytest.raises(RlctlError, match="5 requests wait"):
            pool.generate([replace(requests[0], key=RequestKey(-1, 0))])
        assert pool.stats().waiting == 4
        b.resume(0, Deadline(5))
        assert drain(pool, requests) == alone(requests)
        pool.remove("b")
        pool.remove("a")
        pool.remove("c")
        pool.submit(requests)
        with pytest.raises(RlctlError, match="all have left"):
            drain(pool, requests)


def test_a_replica_that_comes_back_in_time_is_waited_for() -> None:
    requests = make_requests(10, seed=11)
    with replicas("a") as (a,), replicas("a") as (again,):
        pool = ReplicaPool([a], patience=30)
        pool.submit(requests)
        a.kill()
        timer = threading.Timer(0.3, pool.replace, [again])
        timer.start()
        assert drain(pool, requests) == alone(requests)
        timer.join()


def test_a_fenced_replica_gets_nothing_and_what_it_had_moves() -> None:
    requests = make_requests(16, seed=12, longest=40)
    more = [replace(r, key=r.key._replace(ordinal=r.key.ordinal + 50)) for r in make_requests(8, seed=13)]
    changes: list[ReplicaChange] = []
    with replicas("a", "b", pause=0.001) as (a, b):
        pool = ReplicaPool([a, b], on_change=changes.append)
        a.stall(5)
        pool.submit(requests)
        a.until_stalled()
        a.fence("half the weights")
        pool.submit(more)
        assert drain(pool, [*requests, *more]) == alone([*requests, *more])
        assert len(a.taken) == 8
        assert pool.stats().stickiness_breaks > 0
        a.resume(0, Deadline(5))
        pool.step(0.0)
        kinds = [change.change for change in changes if change.replica == "a"]
        assert kinds == ["joined", "serving", "fenced", "serving"]


@pytest.mark.parametrize("how", ["abort", "keep"])
def test_a_sync_is_no_fence(how: Any) -> None:
    requests = make_requests(16, seed=14, longest=40)
    with replicas("a", "b", pause=0.001) as made:
        pool = ReplicaPool(made)
        made[0].stall(5)
        pool.submit(requests)
        made[0].until_stalled()
        with pool.syncing():
            for replica in made:
                replica.interrupt(how, 0, Deadline(5))
            if how == "abort":
                until(lambda: not any(replica.unfinished() for replica in made))
            ended = pool.step(0.02)
            pool.submit([continued(requests[o.key.ordinal], o) for o in ended if o.finish_reason == "abort"])
            assert any(output.finish_reason == "abort" for output in ended) == (how == "abort")
            before = {output.key: output.token_ids for output in ended if output.finish_reason != "abort"}
            for replica in made:
                replica.resume(0, Deadline(5))
            made[0].go_on()
        assert {**before, **drain(pool, requests)} == alone(requests)
        assert pool.stats().stickiness_breaks == 0
        assert pool.stats().resubmitted == 0


@pytest.mark.parametrize("how", ["abort", "wait"])
def test_a_replica_is_removed_and_another_joins(how: Any) -> None:
    requests = make_requests(20, seed=15, longest=40)
    with replicas("a", "b", "c", pause=0.001) as (a, b, c):
        pool = ReplicaPool([a, b])
        with pytest.raises(UsageError, match="a replica a already"):
            pool.add(a)
        with pytest.raises(UsageError, match="there are: a, b"):
            pool.remove("d")
        if how == "abort":
            a.stall(5)
        pool.submit(requests)
        assert pool.remove("a", how) is a
        a.go_on()
        assert len(a.unfinished()) == 0
        ended = {output.key: output for output in pool.step(0.0)}
        assert len(a.taken) == 10
        assert {r.key for r in a.taken} <= set(ended)
        aborted = [output for output in ended.values() if output.finish_reason == "abort"]
        assert bool(aborted) == (how == "abort")
        pool.add(c)
        pool.submit([continued(requests[output.key.ordinal], output) for output in aborted])
        done = {key: output.token_ids for key, output in ended.items() if output.finish_reason != "abort"}
        assert {**done, **drain(pool, requests)} == alone(requests)
        assert len(a.taken) == 10
        assert (len(c.taken) > 0) == (how == "abort")
        pool.add(a)
        again = [replace(r, key=r.key._replace(ordinal=r.key.ordinal + 50)) for r in requests]
        pool.submit(again)
        assert drain(pool, again) == alone(again)
        assert len(a.taken) > 10


def test_a_replica_is_replaced_while_it_works() -> None:
    requests = make_requests(20, seed=16, longest=40)
    with replicas("a", "b", pause=0.001) as (a, b), replicas("a", pause=0.001) as (other,):
        pool = ReplicaPool([a, b])
        a.stall(5)
        pool.submit(requests)
        pool.replace(other)
        a.go_on()
        assert drain(pool, requests) == alone(requests)
        assert len(other.taken) > 0
        until(lambda: len(a.unfinished()) == 0)
        assert pool.stats().late_outputs == len(a.taken) == 10


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


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_kills_fences_and_joins_lose_nothing_and_double_nothing(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    requests = make_requests(40, seed=40 + seed, longest=40)
    with replicas("a", "b", "c", pause=0.0005) as made:
        pool = ReplicaPool(made, patience=30)
        over = threading.Event()

        def disturb() -> None:
            while not over.wait(0.01):
                place = chance.randrange(3)
                replica = made[place]
                act = chance.choice(["kill", "fence", "leave", "sync"])
                if act == "kill":
                    replica.kill()
                    over.wait(0.005)
                    made[place] = ThreadReplica(MODEL, replica.replica, pause=0.0005)
                    pool.replace(made[place])
                    replica.close()
                elif act == "fence":
                    replica.fence("by chance")
                    over.wait(0.01)
                    replica.resume(0, Deadline(5))
                elif act == "leave":
                    pool.remove(replica.replica, chance.choice(["abort", "wait"]), timeout=0.02)
                    over.wait(0.005)
                    pool.add(replica)
                elif act == "sync":
                    with pool.syncing():
                        for one in made:
                            one.interrupt("abort", 0, Deadline(5))
                        for one in made:
                            one.resume(0, Deadline(5))

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            pool.submit(requests)
            assert drain(pool, requests) == alone(requests)
        finally:
            over.set()
            thread.join()
        assert set(pool.stats().requests.values()) == {0}
        print(pool.stats())


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
