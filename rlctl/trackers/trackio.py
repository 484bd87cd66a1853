"""trackio: figures in a local database that ``trackio show`` serves, or in the Space that TRACKIO_SPACE_ID names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rlctl.trackers.base import RunInfo, Tracker


class TrackioTracker(Tracker):
    """One trackio run for a run folder, under the folder's name and the run's id."""

    packages: ClassVar[Mapping[str, str]] = {"trackio": "trackio"}

    def __init__(self, run: RunInfo) -> None:
        import trackio

        self._run = trackio.init(
            project=run.project, name=f"{run.name}-{run.id}", config=run.config, resume="allow", embed=False
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Queue the figures; trackio writes them in a thread of its own."""
        self._run.log(dict(figures), step=step)

    def close(self, status: str) -> None:
        """Wait until everything is written."""
        self._run.finish()
