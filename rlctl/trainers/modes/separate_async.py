"""Generation never stops but for a sync; replicas on the trainer's devices join it while the trainer waits."""

from __future__ import annotations

import time
from typing import Any

from rlctl.experience.events import Switched
from rlctl.experience.schedule_events import LendDecided, RateMeasured
from rlctl.trainers.beside import BesideTrainer
from rlctl.trainers.parts import Parts
from rlctl.trainers.step import StepState
from rlctl.trainers.switching import Measured, decide, finished_groups, lend_inputs


class SeparateAsyncTrainer(BesideTrainer):
    """A step is ``parameter_sync_step`` local updates, each on the groups that are ready, then a sync.

    Replicas on the trainer's own devices (``placement.hybrid_replicas``) generate between two steps when that pays
    (see ``switching``), until the first local update has its groups; and for validations.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.measured = Measured()
        self._lent = False

    def state(self) -> dict[str, Any]:
        return {**super().state(), "switching": self.measured.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if "switching" in state:  # a checkpoint of another mode has none
            self.measured.load(state["switching"])

    def on_train_begin(self) -> None:
        self.measured.begin(finished_groups(self.parts.buffer))
        super().on_train_begin()

    def on_sample_begin(self, step: StepState) -> None:
        super().on_sample_begin(step)
        if step.round == 0 and self.parts.rollouts.hybrids:
            step.time("switch", lambda: self._lend_if_it_pays(step))

    def on_sample_end(self, step: StepState) -> None:
        if self._lent:
            step.time("switch", lambda: self._take_back(step.number))

    def on_step_end(self, step: StepState) -> None:
        if step.error is None:
            self._measure(step)
            step.time("sync", self.update_weights)

    def on_train_end(self) -> None:
        try:
            if self._lent:
                self._take_back(self.step_number)
        finally:
            super().on_train_end()

    def on_validate_begin(self) -> None:
        if self.parts.rollouts.hybrids and not self._lent:
            self.parts.rollouts.to_rollout(self.step_number)

    def on_validate_end(self) -> None:
        if self.parts.rollouts.hybrids and not self._lent:
            self.parts.rollouts.to_trainer()

    def measured_figures(self) -> dict[str, float]:
        return {name: value for name, value in self.measured.state().items() if value is not None}

    def _lend_if_it_pays(self, step: StepState) -> None:
        parts = self.parts
        with parts.buffer.changed:
            inputs = lend_inputs(parts.config, parts.buffer, parts.rollouts.hybrids, self.measured)
            found = decide(inputs)
            parts.events.emit(
                LendDecided(step=step.number, lend=found.lend, why=found.why, gain=found.gain, inputs=inputs.figures())
            )
        step.metrics |= {"switch_lent": float(found.lend), "switch_gain_seconds": found.gain}
        if not found.lend:
            return
        begin = time.perf_counter()
        parts.rollouts.to_rollout(self.step_number)
        self._lent = True
        seconds = time.perf_counter() - begin
        self.measured.lent(seconds)
        figures = inputs.figures() | {"gain": found.gain, "seconds": seconds}
        parts.events.emit(Switched(step=self.step_number, to="rollout", inputs=figures))

    def _take_back(self, step: int) -> None:
        begin = time.perf_counter()
        self._lent = False
        self.parts.rollouts.to_trainer()
        seconds = time.perf_counter() - begin
        self.measured.taken_back(seconds)
        self.parts.events.emit(Switched(step=step, to="trainer", inputs={"seconds": seconds}))

    def _measure(self, step: StepState) -> None:
        """Learn how fast the standalone replicas are, from steps in which they generated alone."""
        seconds = step.metrics["rollout_seconds"]
        with self.parts.buffer.changed:
            finished = finished_groups(self.parts.buffer)
            self.parts.events.emit(
                RateMeasured(step=step.number, finished=finished, seconds=seconds, alone=self.measured.alone)
            )
        self.measured.trained(finished, seconds)
