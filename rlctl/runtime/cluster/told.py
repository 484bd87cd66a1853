"""What a run in many processes tells of its replicas and syncs."""

from __future__ import annotations

from typing import Literal

from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Noted, ReplicaChanged, SyncEnded, SyncPhase
from rlctl.rollout.seats import ReplicaChange
from rlctl.runtime.sync_ended import sync_ended
from rlctl.sync.report import SyncError, SyncEvent, SyncReport

Change = Literal["joined", "left", "slept", "woke", "died", "restarted"]


class Told:
    """Turns what happens into events.

    Args:
        events: where they go.

    Attributes:
        version: of the last sync.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._serving: set[str] = set()
        self.version = -1

    def replica(self, name: str, change: Change, why: str = "") -> None:
        """A replica changed."""
        if change in ("died", "left", "slept"):
            self._serving.discard(name)
        self._events.emit(ReplicaChanged(replica=name, change=change, version=self.version))
        if why:
            self._events.emit(Noted(message=f"replica {name}: {why}"))

    def moved(self, change: ReplicaChange) -> None:
        """Requests of a replica were sent to another."""
        if change.moved:
            message = f"{change.moved} requests of replica {change.replica} go on elsewhere"
            self._events.emit(Noted(message=message))

    def in_sync(self, event: SyncEvent) -> None:
        """Something happened in a sync."""
        if event.kind == "state":
            phase = SyncPhase(version=event.version, phase=event.state, seconds=event.seconds, error=event.detail)
            self._events.emit(phase)
        elif event.kind in ("retry", "fenced"):
            what = f"replica {event.replica} is fenced" if event.kind == "fenced" else "it is tried again"
            self._events.emit(Noted(message=f"sync to version {event.version}: {what}: {event.detail}"))

    def synced(self, report: SyncReport) -> None:
        """A sync ended, with replicas that serve."""
        self._events.emit(sync_ended(report))
        for name in report.committed:
            if name not in self._serving:
                self.replica(name, "joined")
        self._serving = (self._serving - set(report.fenced)) | set(report.committed)

    def not_synced(self, version: int, error: SyncError) -> None:
        """A sync ended, and no replica serves its version."""
        self._events.emit(SyncEnded(version=version, status="failed", fenced=error.fenced))
        self._serving -= set(error.fenced)
