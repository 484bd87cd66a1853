"""Who serves what: the version of every replica, and which are out of routing."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from rlctl.errors import UsageError
from rlctl.sync.protocols import ServedReplica


@dataclass
class ReplicaRecord:
    """One replica, as the manager knows it.

    Attributes:
        served: the replica.
        version: of its weights; None while they are not known to be whole.
        fenced: why it is out of routing; empty while it serves.
        paused_at: when it stopped serving for a sync (``time.monotonic``), None while it serves.
        touched: the sync under way may have written into its live weights.
        error: what went wrong for it in the sync under way.
        broken: it did not do what it was asked to itself (interrupt, release, restore, resume).
    """

    served: ServedReplica
    version: int | None = None
    fenced: str = "its weights have not come yet"
    paused_at: float | None = None
    touched: bool = False
    error: str = ""
    broken: bool = False

    @property
    def name(self) -> str:
        """The replica's name."""
        return self.served.replica

    def begin(self) -> None:
        """Start a sync."""
        self.touched, self.broken, self.error, self.paused_at = False, False, "", None

    def fail(self, reason: str) -> None:
        """Note what went wrong; the first reason stays."""
        self.error = self.error or reason

    def fence(self, reason: str) -> None:
        """Take it out of routing. It comes back when a later sync has filled it in full."""
        if self.touched:
            self.version = None
        self.fenced = reason
        self.served.fence(reason)

    def back(self, version: int) -> float:
        """It serves ``version``; return how long it did not."""
        self.version, self.fenced = version, ""
        stall = 0.0 if self.paused_at is None else monotonic() - self.paused_at
        self.paused_at = None
        return stall


class ReplicaTable:
    """All replicas, by name. They join and leave between syncs."""

    def __init__(self) -> None:
        self._records: dict[str, ReplicaRecord] = {}

    def add(self, replica: ServedReplica) -> None:
        """Add one; until a sync has filled it, it is fenced."""
        if replica.replica in self._records:
            raise UsageError(f"there is a replica {replica.replica} already")
        self._records[replica.replica] = ReplicaRecord(replica)

    def remove(self, name: str) -> None:
        """Part with one."""
        del self._records[name]

    def lost(self, name: str, reason: str) -> None:
        """A replica was restarted, or died: it has no weights."""
        record = self._records[name]
        record.touched = True
        record.fence(reason)

    def records(self) -> list[ReplicaRecord]:
        """Return all records, in the order they were added."""
        return list(self._records.values())

    def common_version(self) -> int | None:
        """Return the version that all replicas serve, or None: then deltas have no base."""
        versions = {None if r.fenced else r.version for r in self._records.values()}
        return versions.pop() if len(versions) == 1 else None
