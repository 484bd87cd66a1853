"""Which steps keep their record, and which checkpoints are kept for them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rlctl.experience.records.manifest import Pin


@dataclass(frozen=True)
class Window:
    """The last steps of a run that can be trained again from a checkpoint.

    A step is trained again from the nearest checkpoint before it, through the recorded steps between. So the records
    reach back to a checkpoint before the window, and checkpoints half a window apart are kept, so that the way to a
    step is never longer than that, and the record never longer than one window and a half, and the distance of two
    checkpoints.

    Attributes:
        steps: how many; 0 keeps the whole run.
        checkpoint_every: steps between checkpoints; 0: there are none on the way.
    """

    steps: int
    checkpoint_every: int

    @property
    def most(self) -> int:
        """The most steps with a record that are kept at once, those that are pinned not counted; 0: all."""
        return self.steps + self._apart + self.checkpoint_every if self.steps else 0

    def needed(self, step: int, checkpoints: Iterable[int]) -> list[int]:
        """Return the checkpoints that records of a run that has come to ``step`` stand on."""
        ordered = sorted(checkpoints)
        if not self.steps:
            return ordered[:1]
        if (begin := self._begin(step, ordered)) is None:
            return []
        chosen = [begin]
        for checkpoint in ordered:
            if chosen[-1] + self._apart <= checkpoint <= step:
                chosen.append(checkpoint)
        return chosen

    def first(self, step: int, checkpoints: Iterable[int]) -> int:
        """Return the first step whose record is kept in a run that has come to ``step``."""
        if not self.steps:
            return 1
        begin = self._begin(step, sorted(checkpoints))
        return step - self.steps + 1 if begin is None else begin + 1

    @property
    def _apart(self) -> int:
        return max(self.steps // 2, 1)

    def _begin(self, step: int, checkpoints: Sequence[int]) -> int | None:
        """Return the checkpoint that the window is reached from; None when it is not worth what it costs."""
        oldest = max((c for c in checkpoints if c <= step - self.steps), default=None)
        if oldest is None:
            return checkpoints[0] if checkpoints and checkpoints[0] <= step else None
        return oldest if step - oldest <= self.most else None


def discarded(recorded: Iterable[int], first: int, pins: Collection[Pin]) -> list[int]:
    """Return the recorded steps that go: those before ``first`` which no pin needs."""
    kept = {step for pin in pins for step in range(way_to(pin), pin.step + 1)}
    return [step for step in recorded if step < first and step not in kept]


def way_to(pin: Pin) -> int:
    """Return the first step on the way to a pinned one from the checkpoint before it."""
    return pin.step if pin.checkpoint is None else pin.checkpoint + 1
