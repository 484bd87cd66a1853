"""Brings new weights to all replicas, one sync at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rlctl.errors import UsageError
from rlctl.sync.engine import CheckpointEngine
from rlctl.sync.fencing import ReplicaRecord, ReplicaTable
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.protocols import Group, ServedReplica
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.replica_calls import ReplicaCalls
from rlctl.sync.report import SyncError, SyncEvent, SyncReport
from rlctl.sync.transaction import Transaction


class SyncManager:
    """Keeps who serves which version, and runs syncs.

    Args:
        trainers: one member for each trainer rank.
        rollouts: one or more members for each replica; each names its replica.
        replicas: those that there are; until a sync has filled them, they are fenced.
        engine: class or name of the checkpoint engine that the members have.
        policy: how syncs are done.
        on_event: told what happens, in the thread that syncs.
    """

    def __init__(
        self,
        trainers: Group,
        rollouts: Group,
        replicas: Iterable[ServedReplica],
        *,
        engine: type[CheckpointEngine] | str,
        policy: SyncPolicy | None = None,
        on_event: Callable[[SyncEvent], None] = lambda _: None,
    ) -> None:
        self._replicas = ReplicaTable()
        self.version: int | None = None
        self._trainers = trainers
        self._rollouts = rollouts
        self._engine = CHECKPOINT_ENGINES.load(engine) if isinstance(engine, str) else engine
        self._policy = policy or SyncPolicy()
        self._on_event = on_event
        self._calls = ReplicaCalls()
        self._syncing = threading.Lock()
        for replica in replicas:
            self._replicas.add(replica)

    @property
    def versions(self) -> dict[str, int | None]:
        """Replica -> the version it serves, None while it is fenced."""
        return {r.name: None if r.fenced else r.version for r in self._replicas.records()}

    @property
    def fenced(self) -> dict[str, str]:
        """Replica -> why it is out of routing."""
        return {r.name: r.fenced for r in self._replicas.records() if r.fenced}

    def add(self, replica: ServedReplica) -> None:
        """Let a replica join, when no sync is under way; the next one, or ``catch_up``, fills it. Its members are in
        ``rollouts``."""
        with self._syncing:
            self._replicas.add(replica)

    def remove(self, name: str) -> None:
        """Part with a replica, when no sync is under way."""
        with self._syncing:
            self._replicas.remove(name)

    def lost(self, name: str, reason: str) -> None:
        """A replica died or was restarted: fence it, when no sync is under way; the next one, or ``catch_up``, sends
        it everything."""
        with self._syncing:
            self._replicas.lost(name, reason)

    def sync(self, version: int) -> SyncReport:
        """Bring every replica to ``version``, or leave it as it was, or fence it: see ``SyncPolicy.commit``.

        Returns the report, also when some replicas were fenced. Raises SyncError, with the report, when none serves
        ``version`` in the end; UsageError when a sync is under way.
        """
        with self._alone():
            base = self._replicas.common_version() if self._policy.delta else None
            report = self._transaction(version, base, self._replicas.records(), self._policy).run()
            self.version = version
            return report

    def catch_up(self) -> dict[str, SyncReport]:
        """Bring the replicas that are fenced to the version that the others serve, one after another, out of what the
        trainer's side kept of it. The trainer's weights are not looked at, and no other replica is asked anything.

        Returns each one's report; one that did not get there stays fenced. Empty when the engine keeps no version
        (``serves_late``), so that they wait for the next sync. Raises UsageError when a sync is under way.
        """
        reports: dict[str, SyncReport] = {}
        with self._alone():
            if self.version is None or not self._engine.serves_late:
                return reports
            policy = replace(self._policy, commit="inplace")  # there is no older version to keep
            for record in [r for r in self._replicas.records() if r.fenced]:
                try:
                    reports[record.name] = self._transaction(self.version, None, [record], policy, again=True).run()
                except SyncError as error:
                    assert error.report is not None
                    reports[record.name] = error.report
        return reports

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._syncing.acquire(blocking=False):
            raise UsageError("a sync is under way already")
        try:
            yield
        finally:
            self._syncing.release()

    def _transaction(
        self,
        version: int,
        base: int | None,
        records: Sequence[ReplicaRecord],
        policy: SyncPolicy,
        *,
        again: bool = False,
    ) -> Transaction:
        return Transaction(
            version,
            base,
            trainers=self._trainers,
            rollouts=self._rollouts,
            records=records,
            calls=self._calls,
            engine=self._engine,
            policy=policy,
            again=again,
            on_event=self._on_event,
        )
