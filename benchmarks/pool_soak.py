"""Replica processes killed, stopped, removed and filled anew under load: every response is that of one engine.

    PYTHONPATH=. python benchmarks/pool_soak.py --rounds 40

A round sends requests through a pool, something happens to its replicas meanwhile, and it ends when all of them serve
again and every request has ended once, with the tokens that one engine in this process makes. Stops at the first that
differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

from rlctl.errors import UsageError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Request
from rlctl.rollout.pool import ReplicaPool
from rlctl.rollout.remote.replica import RemoteReplica
from rlctl.rollout.seats import ReplicaChange
from rlctl.sync.deadline import Deadline
from rlctl.sync.manager import SyncManager
from rlctl.sync.protocols import Interruption
from rlctl.sync.report import SyncError
from tests.rollout.remote.house import House, alone, begun, setup_of
from tests.rollout.tiny import make_requests

ROUND_SECONDS = 300.0
SILENCE = 3.0


class Fate:
    """What happens to the replicas.

    Args:
        house: replicas, their workers and the trainer.
        pool: has the replicas.
        rng: chooses.
    """

    def __init__(self, house: House, pool: ReplicaPool, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._house = house
        self._pool = pool
        self._rng = rng
        self._version = 0
        self._managers: dict[Interruption, SyncManager] = {}
        self._acts: dict[str, Callable[[RemoteReplica], None]] = {
            "killed": self._kill,
            "stopped for a moment": lambda replica: self._stop(replica, 0.3),
            "stopped for too long": lambda replica: self._stop(replica, SILENCE + 2.0),
            "removed and added": self._leave,
            "fenced": lambda replica: replica.fence("by chance"),
            "synced": lambda _: None,
            "killed in a sync": self._kill_soon,
        }

    def act(self) -> None:
        """Do one thing to one replica, and have all serve again."""
        name = self._rng.choice(list(self._acts))
        time.sleep(self._rng.uniform(0.0, 0.2))
        self._acts[name](self._rng.choice(self._house.replicas))
        self.recover(self._rng.choice(get_args(Interruption)))
        self.counts[name] += 1

    def _kill(self, replica: RemoteReplica) -> None:
        if not replica.lost:
            os.kill(replica.pid, signal.SIGKILL)
        time.sleep(self._rng.uniform(0.0, 0.2))

    def _kill_soon(self, replica: RemoteReplica) -> None:
        threading.Timer(self._rng.uniform(0.0, 0.1), self._kill, [replica]).start()

    def _stop(self, replica: RemoteReplica, seconds: float) -> None:
        os.kill(replica.pid, signal.SIGSTOP)
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(replica.pid, signal.SIGCONT)

    def _leave(self, replica: RemoteReplica) -> None:
        self._pool.remove(replica.replica, self._rng.choice(["abort", "wait"]), timeout=1.0)
        time.sleep(self._rng.uniform(0.0, 0.2))
        self._pool.add(replica)

    def recover(self, how: Interruption) -> None:
        """Sync; restart what is lost, and sync again, until all serve."""
        self._sync(how)
        for _ in range(10):
            time.sleep(0.05)  # a death that has just happened is seen
            gone = [replica for replica in self._house.replicas if replica.lost]
            for replica in gone:
                replica.restart(Deadline(60))
                for manager in self._managers.values():
                    manager.lost(replica.replica, "restarted")
            if all(replica.serving is not None for replica in self._house.replicas):
                return
            self._sync("abort")
        raise AssertionError("replicas do not come back")

    def _sync(self, how: Interruption) -> None:
        if how not in self._managers:
            self._managers[how] = self._house.manager(interruption=how, timeout=20.0)
        self._version += 1
        with self._pool.syncing(), suppress(SyncError):
            self._managers[how].sync(self._version)


def one_round(
    pool: ReplicaPool, act: Future[None], requests: list[Request], expected: Mapping[RequestKey, list[int]]
) -> int:
    """See requests end and the act, too; return how many requests were interrupted and sent again."""
    by_key = {request.key: request for request in requests}
    limit, ended, again = time.monotonic() + ROUND_SECONDS, set(), 0
    while pool.num_running or not act.done():
        assert time.monotonic() < limit, f"{pool.num_running} requests have not ended: {pool.stats()}"
        for output in pool.step(0.5):
            assert output.key not in ended, f"{output.key} ended twice"
            if output.finish_reason == "abort":
                again += 1
                pool.submit([replace(by_key[output.key], prefix=tuple(output.segments))])
            else:
                ended.add(output.key)
                assert output.token_ids == expected[output.key], f"{output.key} differs"
    act.result()
    assert ended == set(by_key), "a request was lost"
    return again


def main() -> None:
    """Run the rounds and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--backend", default="ipc")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    if args.replicas < 1:
        raise UsageError("no replica to send requests to")
    print(f"seed {args.seed}", flush=True)
    changes: Counter[str] = Counter()

    def changed(change: ReplicaChange) -> None:
        changes[change.change] += 1

    with tempfile.TemporaryDirectory() as folder:
        setups = [setup_of(Path(folder), f"replica-{index}", progress_ticks=8) for index in range(args.replicas)]
        replicas = begun(setups, silence=SILENCE)
        house = House(replicas, args.backend)
        pool = ReplicaPool(replicas, on_change=changed, patience=120.0, call_timeout=30.0)
        fate = Fate(house, pool, random.Random(args.seed))
        acting = ThreadPoolExecutor(1)
        begin, again = time.monotonic(), 0
        try:
            fate.recover("abort")
            for number in range(args.rounds):
                requests = make_requests(args.requests, args.seed + number, longest=200, samples=2, stop_token_ids=(3,))
                expected = {o.key: o.token_ids for o in alone(house.trainer.model, requests, version=1)}
                pool.submit(requests)
                again += one_round(pool, acting.submit(fate.act), requests, expected)
                print(f"{number + 1} {pool.stats()}", flush=True)
        finally:
            acting.shutdown()
            pool.close()
            house.close()
            for replica in replicas:
                replica.close()
    for title, counts in (("what was done", fate.counts), ("what the pool was told", changes)):
        print(f"{title}: {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}")
    print(f"{args.rounds} rounds of {args.requests} requests in {time.monotonic() - begin:.0f} s; {again} sent again")


if __name__ == "__main__":
    main()
