"""Lending told again: whether the trainer's devices join the generation, from what was ready and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_base import Event
from rlctl.experience.events import Selected, StepEnded, Switched
from rlctl.experience.schedule_events import LendDecided, RateMeasured, ScheduleBegan
from rlctl.replay.scheduling.expecting import require
from rlctl.schema import Config
from rlctl.trainers.switching import Measured, decide, finished_groups, lend_inputs


class Lending:
    """The real ``decide`` and ``Measured``, driven by one attempt's events. Seconds are measured, not decided.

    Args:
        config: of the attempt.
        began: where it stood.
        buffer: as it stands.
        lends: whether the mode lends at all.
    """

    def __init__(self, config: Config, began: ScheduleBegan, buffer: GroupBuffer, *, lends: bool) -> None:
        self._config, self._buffer, self._hybrids = config, buffer, began.hybrids
        self._measures, self._decides = lends, lends and began.hybrids > 0
        self.measured = Measured(began.measured.get("rate"), began.measured.get("cost"))
        self.measured.begin(finished_groups(buffer))
        self._decided = self._measured = began.step  # for the sampling of this step, and after it
        self._lend = self._lent = False
        self.handlers: Mapping[type[Event], Callable[[Any], None]] = {
            LendDecided: self._decide,
            Switched: self._switched,
            RateMeasured: self._rate,
            StepEnded: self._ended,
            Selected: self._selected,
        }

    def figures(self) -> dict[str, float]:
        """Return what is known, as an attempt that goes on from here has it."""
        return {name: value for name, value in self.measured.state().items() if value is not None}

    def take(self, event: Event) -> None:
        """Take an event. Raises DisagreementError."""
        self.handlers[type(event)](event)

    def _decide(self, event: LendDecided) -> None:
        require(self._decides and not self._lent, event, "lending", "there is nothing to lend")
        inputs = lend_inputs(self._config, self._buffer, self._hybrids, self.measured)
        figures = inputs.figures()
        require(event.inputs == figures, event, "lending", f"it rests on {event.inputs}, and here on {figures}")
        found = decide(inputs)
        told = (event.lend, event.why, event.gain)
        require(told == found, event, "lending", f"{told}, and {tuple(found)} comes out here")
        self._decided, self._lend = event.step, found.lend

    def _switched(self, event: Switched) -> None:
        if event.to == "rollout":
            require(self._lend and not self._lent, event, "lending", "the devices are not to be lent")
            self.measured.lent(event.inputs["seconds"])
        else:
            require(self._lent, event, "lending", "the devices are the trainer's")
            self.measured.taken_back(event.inputs["seconds"])
            self._lend = False
        self._lent = event.to == "rollout"

    def _selected(self, event: Selected) -> None:
        if self._decides:
            require(self._decided == event.step, event, "lending", "it was not decided whether to lend before it")
            require(self._lent == self._lend, event, "lending", "the devices were to be lent before it")

    def _rate(self, event: RateMeasured) -> None:
        finished = finished_groups(self._buffer)
        require(event.finished == finished, event, "lending", f"{finished} groups have been finished")
        require(event.alone == self.measured.alone, event, "lending", "who generated is told otherwise")
        self.measured.trained(finished, event.seconds)
        self._measured = event.step

    def _ended(self, event: StepEnded) -> None:
        require(not self._lent, event, "lending", "the devices were not taken back")
        if self._measures:
            require(self._measured == event.step, event, "lending", "it was not told how fast groups were made")
