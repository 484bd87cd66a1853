"""What of a trainer survives its process, and how it is saved and found again."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.experience.events import Checkpointed, Noted
from rlctl.rollout.rollouter import Evaluation
from rlctl.runtime.checkpoints import read_checkpoint
from rlctl.trainers.parts import Parts


class Saved:
    """The part of a trainer that checkpoints.

    Attributes:
        parts: of the run.
        step_number: steps trained so far.
        evaluations: of the weights after a number of steps.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.step_number = 0
        self.evaluations: list[tuple[int, Evaluation]] = []
        self._saved_step = -1

    def finish_validations(self) -> None:
        """Wait for validations that are under way, and file them."""

    def state(self) -> dict[str, Any]:
        """Return the trainer's own state; the parts have theirs."""
        return {
            "step": self.step_number,
            "next_seq": self.parts.events.next_seq,
            "evaluations": [[step, asdict(found)] for step, found in self.evaluations],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on after ``state['step']``."""
        self.step_number = self._saved_step = state["step"]
        self.evaluations = [(step, Evaluation(**found)) for step, found in state["evaluations"]]

    def save_checkpoint(self) -> None:
        """Publish a checkpoint of everything that must survive."""
        begin = time.perf_counter()
        self.finish_validations()
        if self.parts.recorder is not None:
            self.parts.recorder.flush()  # a run that goes on from here has the record of every step before it
        with self.parts.rollouter.saving():
            self.parts.events.flush()
            path = self.parts.checkpoints.save(self.step_number, {"trainer": self, **self.parts.saved()})
        self._saved_step = self.step_number
        seconds = time.perf_counter() - begin
        self.parts.events.emit(Checkpointed(step=self.step_number, name=path.name, seconds=seconds))

    def resume(self) -> int:
        """Load the newest checkpoint that is whole and return the event number that it goes on from.

        Raises:
            RlctlError: there are checkpoints, and none can be read.
        """
        steps = self.parts.checkpoints.steps()
        for number in reversed(steps):
            try:
                return self.load_checkpoint(self.parts.checkpoints.path(number))
            except RlctlError as error:
                if number == steps[0]:
                    raise
                self.parts.events.emit(Noted(message=f"checkpoint step_{number} is skipped: {error.message}"))
        return -1

    def load_checkpoint(self, folder: Path) -> int:
        """Load one checkpoint and return the event number that it goes on from. Raises RlctlError."""
        _, states = read_checkpoint(folder)
        parts = {"trainer": self, **self.parts.saved()}
        if absent := parts.keys() - states.keys():
            fix = "go on with the settings that it was saved under, or start another run"
            raise RlctlError(f"the checkpoint has no state of: {', '.join(sorted(absent))}", where=str(folder), fix=fix)
        for name, part in parts.items():
            part.load(states[name])
        self.parts.buffer.continue_from(self.step_number)
        return int(states["trainer"]["next_seq"]) - 1
