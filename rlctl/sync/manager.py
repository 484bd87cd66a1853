"""Brings new weights to all replicas, one sync at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from rlctl.errors import UsageError
from rlctl.sync.engine import CheckpointEngine
from rlctl.sync.fencing import ReplicaTable
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.protocols import Group, ServedReplica
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.replica_calls import ReplicaCalls
from rlctl.sync.report import SyncEvent, SyncReport
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
        """Let a replica join, when no sync is under way; the next one fills it. Its members are in ``rollouts``."""
        with self._syncing:
            self._replicas.add(replica)

    def remove(self, name: str) -> None:
        """Part with a replica, when no sync is under way."""
        with self._syncing:
            self._replicas.remove(name)

    def lost(self, name: str, reason: str) -> None:
        """A replica died or was restarted: fence it, when no sync is under way; the next one sends it everything."""
        with self._syncing:
            self._replicas.lost(name, reason)

    def sync(self, version: int) -> SyncReport:
        """Bring every replica to ``version``, or leave it as it was, or fence it: see ``SyncPolicy.commit``.

        Returns the report, also when some replicas were fenced. Raises SyncError, with the report, when none serves
        ``version`` in the end; UsageError when a sync is under way.
        """
        if not self._syncing.acquire(blocking=False):
            raise UsageError("a sync is under way already")
        try:
            base = self._replicas.common_version() if self._policy.delta else None
            transaction = Transaction(
                version,
                base,
                trainers=self._trainers,
                rollouts=self._rollouts,
                records=self._replicas.records(),
                calls=self._calls,
                engine=self._engine,
                policy=self._policy,
                on_event=self._on_event,
            )
            report = transaction.run()
            self.version = version
            return report
        finally:
            self._syncing.release()
