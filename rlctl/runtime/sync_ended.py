"""The event of a sync that has ended, out of its report."""

from __future__ import annotations

from typing import Literal

from rlctl.experience.events import SyncEnded
from rlctl.sync.report import SyncReport
from rlctl.sync.states import Ending

_STATUS: dict[Ending, Literal["committed", "rolled_back", "fenced"]] = {
    Ending.COMMITTED: "committed",
    Ending.KEPT: "rolled_back",
    Ending.FENCED: "fenced",
}


def sync_ended(report: SyncReport) -> SyncEnded:
    """Return the event."""
    return SyncEnded(
        version=report.version,
        status=_STATUS[report.ending],
        loaded=report.tensors,
        bytes=report.bytes,
        seconds=report.seconds,
        kept=report.kept_nbytes,
        fenced=list(report.fenced),
    )
