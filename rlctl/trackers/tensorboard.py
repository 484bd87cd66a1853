"""TensorBoard, through the package ``tensorboard`` alone: event files of scalars."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar

from rlctl.trackers.base import RunInfo, Tracker


class TensorBoardTracker(Tracker):
    """One event file an attempt. A later attempt begins with a mark that voids the steps it does again."""

    packages: ClassVar[Mapping[str, str]] = {"tensorboard": "tensorboard"}

    def __init__(self, run: RunInfo) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(run.folder)
        if run.from_step:
            mark = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=run.from_step + 1, session_log=mark))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write one event with all figures and hand it to the operating system."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, status: str) -> None:
        """Close the file."""
        self._writer.close()
