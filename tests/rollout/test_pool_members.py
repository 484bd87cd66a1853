"""Members of the pool come, go, are fenced and replaced under load; the tokens are always those of one engine alone."""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.pool import ReplicaPool
from rlctl.rollout.seats import ReplicaChange
from rlctl.sync.deadline import Deadline
from tests.rollout.pooled import MODEL, alone, continued, drain, replicas
from tests.rollout.thread_replicas import ThreadReplica
from tests.rollout.tiny import make_requests
from tests.waiting import until


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
