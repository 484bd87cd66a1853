"""Replicas in processes of their own, their checkpoint-engine workers, and the manager of their weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlctl.keys.lora.config import AdapterConfig
from rlctl.rollout.remote.replica import RemoteReplica
from rlctl.runtime.cluster.bases import Bases
from rlctl.runtime.cluster.making import engine_options, logged, replica_setup, sync_policy
from rlctl.runtime.cluster.probed_replica import Agreement, ProbedReplica
from rlctl.runtime.cluster.revival import Life, Revival
from rlctl.runtime.launch.launcher import Launcher, Place, PlaceKind
from rlctl.schema import Config
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.manager import SyncManager
from rlctl.sync.protocols import Group
from rlctl.sync.report import SyncError, SyncEvent, SyncReport
from rlctl.sync.waiting import gather
from rlctl.sync.worker_process import WorkerProcesses

# Until a replica's process has its engine, without weights.
START_SECONDS = 300.0
# Until a process that was killed counts as lost.
_END_SECONDS = 10.0
# Starts of a replica in a row that may fail.
TRIES = 3

Tell = Callable[[str, Life, str], None]


class Fleet:
    """Replicas of one kind of place.

    Args:
        config: resolved.
        kind: "replica", with devices of their own, or "hybrid", on the trainer's.
        names: of the replicas; the place of each has its number.
        source: folder or hub name of the model.
        adapter: of the adapters that are sent alone; None where whole weights are.
        launcher: starts all processes, a replica's worker at the replica's place.
        logs: folder of what they print; None discards it.
        agreement: how a replica is compared with the trainer after each sync.
        before_kv: called each time before a replica's KV cache comes back.
        tell: told of deaths and restarts.

    Attributes:
        manager: of their weights, from ``manage`` on.
        bases: who holds the base of adapters that are sent alone; None where whole weights are.
    """

    manager: SyncManager
    bases: Bases | None

    def __init__(
        self,
        config: Config,
        kind: PlaceKind,
        names: Iterable[str],
        *,
        source: str,
        vocab_size: int,
        adapter: AdapterConfig | None = None,
        launcher: Launcher,
        logs: Path | None,
        agreement: Agreement,
        before_kv: Callable[[], None],
        tell: Tell,
    ) -> None:
        self._config = config
        self.remotes: dict[str, RemoteReplica] = {}
        self.replicas: dict[str, ProbedReplica] = {}
        self.workers = WorkerProcesses(config.sync.backend, engine_options(config), one_machine=launcher.one_machine())
        for index, name in enumerate(names):
            start = launcher.starter(Place(kind, index))
            log, worker_log = (None if logs is None else logs / f"{what}_{name}.log" for what in ("replica", "worker"))
            self.remotes[name] = remote = RemoteReplica(
                replica_setup(config, source, name, adapter, logs=logs, vocab_size=vocab_size), start, output=log
            )
            self.replicas[name] = replica = ProbedReplica(
                remote, agreement, lockstep=config.run.deterministic, before_kv=before_kv, on_lost=self._lost
            )
            self.workers.join(name, replica.loaders, start=logged(start, worker_log))
        self.revival = Revival(self.remotes.values(), tries=TRIES, timeout=START_SECONDS, tell=tell)

    def begin(self, deadline: Deadline) -> list[Future[Any]]:
        """Start all processes; return what is done when they are there, or have failed to be."""
        futures: list[Future[Any]] = [
            call(lambda r=remote: r.begin(deadline), f"start replica {name}")  # type: ignore[misc]
            for name, remote in self.remotes.items()
        ]
        return [*futures, call(lambda: self.workers.open(deadline.remaining), "start checkpoint-engine workers")]

    def manage(self, trainers: Group, on_event: Callable[[SyncEvent], None], *, bases: Bases | None) -> None:
        """Say who sends the weights, who is told what happens in syncs, and, when adapters are sent alone, who asks
        for their base."""
        config = self._config
        self.bases = bases
        self.manager = SyncManager(
            trainers,
            self.workers,
            (),
            engine=config.sync.backend,
            policy=sync_policy(config),
            on_event=on_event,
        )

    @property
    def living(self) -> list[ProbedReplica]:
        """Those that are there, whatever they serve."""
        return [replica for replica in self.replicas.values() if not replica.lost]

    def each(self, what: str, act: Callable[[ProbedReplica], None], deadline: Deadline) -> None:
        """Do something with all living replicas at once; one that fails is fenced."""
        replicas = {replica.replica: replica for replica in self.living}
        futures = {
            name: call(lambda r=replica: act(r), f"{what} {name}")  # type: ignore[misc]
            for name, replica in replicas.items()
        }
        for name, error in gather(futures, deadline, what).errors.items():
            replicas[name].fence(f"{what}: {error.message}")
        self._end_stuck()

    def give_up(self, name: str, reason: str) -> None:
        """End the process of a replica that lives and is of no use, so that it is started again."""
        remote, limit = self.remotes[name], Deadline(_END_SECONDS)
        if remote.lost:
            return
        remote.kill(reason)
        while not remote.lost and not limit.over:  # its connection's thread is about to say so
            time.sleep(0.01)

    def _end_stuck(self) -> bool:
        """End the replicas that did not do in time what they were told; return whether there were any."""
        stuck = {name: what for name, replica in self.replicas.items() if (what := replica.take_stuck())}
        for name, what in stuck.items():
            self.give_up(name, f"it was stuck, and was killed: {what}")
        return bool(stuck)

    def versions(self) -> dict[str, int | None]:
        """Return the version that each serves; None while it does not."""
        return {**dict.fromkeys(self.replicas), **self.manager.versions}

    def sync(self, version: int, deadline: Deadline) -> SyncReport:
        """Bring those that are there to a version. When none of them lives to serve it, those that are started again
        get it, as often as they may be.

        Raises:
            SyncError: none serves it.
        """
        while True:
            self.revival.wait(lambda: bool(self.living), deadline)
            died = self.seat()
            there = self.living
            if not there:
                each = "; ".join(f"{replica.replica}: {replica.lost}" for replica in self.replicas.values())
                raise SyncError(
                    f"version {version} finds no replica: none was started again in time ({each})",
                    fenced=list(self.replicas),
                    fix="their logs in the run's folder say why; go on with --resume auto",
                )
            if self.bases is not None:
                self.bases.before([replica.replica for replica in there], died)
            try:
                report = self.manager.sync(version)
            except SyncError as error:
                if self.bases is not None:
                    self.bases.after((), error.fenced)
                self._end_stuck()
                if deadline.over or not any(replica.lost for replica in there):
                    raise
                continue  # it died of something that need not be there when it is started again
            if self.bases is not None:
                self.bases.after(report.committed, report.fenced)
            self.revival.served(report.committed)
            self._end_stuck()
            return report

    def seat(self) -> set[str]:
        """Have the manager know those that are there, without weights those that were started again since the last
        time; return these."""
        died = self.revival.take_losses()
        for name, replica in self.replicas.items():
            if name in self.manager.versions and (name in died or replica.lost):
                self.manager.remove(name)
            if not replica.lost and name not in self.manager.versions:
                self.manager.add(replica)
        return died

    def close(self) -> None:
        """End all processes. Harmless when repeated."""
        self.revival.close()
        for remote in self.remotes.values():
            remote.close()
        self.workers.close()

    def _lost(self, name: str, reason: str) -> None:
        self.revival.lost(name, reason)
