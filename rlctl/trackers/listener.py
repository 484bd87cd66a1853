"""From the events of a run to the figures of its trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, Noted, RunEnded, StepEnded, Validated
from rlctl.trackers.base import RunInfo
from rlctl.trackers.client import TrackerClient, TrackerError

_NAP_SECONDS = 0.02
_STOPPED_SECONDS = 10.0
"""A run that a signal stops has its checkpoint, and who sent the signal will not wait long for it to end."""


class Trackers:
    """The trackers of one attempt. One that fails is told of, once, and left out from then on; the run goes on.

    Args:
        targets: name -> ``module:Class``, as ``require_trackers`` gives it.
        run: what they follow; each gets a folder of its own under ``run.folder``.
        events: where warnings go, and whose later events are followed.
        patience: seconds that a tracker may take for one record, and for ending.
        output: file for what trackers print.
    """

    def __init__(
        self, targets: Mapping[str, str], run: RunInfo, events: EventLog, *, patience: float, output: Path
    ) -> None:
        self._events = events
        self._patience = patience
        self._status = "failed"
        self._clients: list[TrackerClient] = []
        for name, target in targets.items():
            folder = Path(run.folder, name)
            folder.mkdir(parents=True, exist_ok=True)
            own = RunInfo(run.project, run.name, run.id, str(folder), run.config, run.from_step)
            try:
                self._clients.append(TrackerClient(name, target, own, patience=patience, output=output))
            except TrackerError as error:
                self._warn(name, error)
        if self._clients:
            events.subscribe(self.on_event)

    def on_event(self, event: Event) -> None:
        """Pass on the figures of a step or an evaluation."""
        if isinstance(event, RunEnded):
            self._status = event.status
            return
        figures = figures_of(event)
        if figures:
            step = event.step  # type: ignore[attr-defined]
            self._each(lambda client: client.log(step, figures))

    def finish(self) -> None:
        """Close every tracker, all within one patience, or sooner where a stop was asked for; the late are ended."""
        stopped = self._status in ("preempted", "interrupted")
        seconds = min(self._patience, _STOPPED_SECONDS) if stopped else self._patience
        end = time.monotonic() + seconds
        self._each(lambda client: client.close(self._status))
        while self._clients and time.monotonic() < end:
            self._each(TrackerClient.poll)
            for client in [client for client in self._clients if client.idle]:
                self._clients.remove(client)
                client.end()
            if self._clients:
                time.sleep(_NAP_SECONDS)
        for client in self._clients:
            client.kill()
            self._warn(client.name, TrackerError(f"it did not end within {seconds:g} s"))
        self._clients = []

    def _each(self, act: Callable[[TrackerClient], list[str]]) -> None:
        for client in list(self._clients):
            try:
                notices = act(client)
            except TrackerError as error:
                self._clients.remove(client)
                self._warn(client.name, error)
            except BaseException:
                client.kill()
                raise
            else:
                for notice in notices:
                    self._events.emit(Noted(message=f"tracker {client.name}: {notice}"))

    def _warn(self, name: str, error: TrackerError) -> None:
        self._events.emit(Noted(message=f"tracker {name} is left out from here on: {error}; the run goes on"))


def figures_of(event: Event) -> dict[str, float]:
    """Return what trackers are told of ``event``: ``train/*`` of a step, ``eval/*`` of an evaluation, else nothing."""
    if isinstance(event, StepEnded):
        return {f"train/{name}": value for name, value in event.figures.items()}
    if isinstance(event, Validated):
        labels = {f"eval/accuracy/{label}": value for label, value in event.by_label.items()}
        return {"eval/accuracy": event.accuracy, **labels}
    return {}
