"""Where a run stands in its stream of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlctl.errors import UsageError
from rlctl.tasks.base import Sample, Task
from rlctl.tasks.counter import draw, permutation


class PromptCursor:
    """Hands out training prompts in an order that depends on the seed and the position alone.

    A finite task is shuffled anew each epoch, and an epoch contains each prompt once; batches run on over the end of
    an epoch, so only the very last one may be short. An endless task is drawn by position.

    Args:
        task: where the prompts come from.
        seed: the run's seed.
        epochs: stop after so many passes over a finite task; None never stops.
    """

    def __init__(self, task: Task, seed: int, epochs: int | None = None) -> None:
        if epochs is not None and task.size is None:
            raise UsageError(f"task {task.name!r} is endless: it has no epochs", fix="set run.steps instead")
        if epochs is not None and epochs < 1:
            raise UsageError(f"epochs must be at least 1, not {epochs}")
        self._task = task
        self._seed = seed
        self._size = task.size
        self._end = None if epochs is None or task.size is None else epochs * task.size
        self._next = 0
        self._order: npt.NDArray[np.int64] | None = None
        self._order_epoch = -1

    @property
    def ordinal(self) -> int:
        """Position of the next prompt, counted over the whole run."""
        return self._next

    @property
    def epoch(self) -> int:
        """Epoch that the next prompt belongs to, from 0; always 0 for an endless task."""
        return 0 if self._size is None else self._next // self._size

    @property
    def remaining(self) -> int | None:
        """Prompts left until the last epoch ends; None when there is no end."""
        return None if self._end is None else self._end - self._next

    def take(self, n: int) -> list[tuple[int, Sample]]:
        """Return the next ``n`` prompts with their ordinals: fewer at the end, none after it."""
        stop = self._next + n if self._end is None else min(self._next + n, self._end)
        taken = [(ordinal, self.at(ordinal)) for ordinal in range(self._next, stop)]
        self._next = max(self._next, stop)
        return taken

    def at(self, ordinal: int) -> Sample:
        """Return the prompt at a position without moving, as for prompts that were under way when a run stopped."""
        if self._size is None:
            return self._task.sample(draw(self._seed, ordinal) >> 11)
        epoch, within = divmod(ordinal, self._size)
        if self._order is None or epoch != self._order_epoch:
            self._order, self._order_epoch = permutation(self._size, self._seed, epoch), epoch
        return self._task.sample(int(self._order[within]))

    def state(self) -> dict[str, Any]:
        """Return the position and what it refers to, as plain JSON values."""
        return {"ordinal": self._next, "seed": self._seed, "task": self._task.name, "digest": self._task.digest}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Raises UsageError if it belongs to another seed or other data, since the order
        of the prompts would silently differ. The number of epochs may change between runs."""
        mine = self.state()
        for key, what in (("task", "another task"), ("digest", "other data"), ("seed", "another seed")):
            if state[key] != mine[key]:
                raise UsageError(
                    f"the saved position belongs to {what}: {state[key]!r}, this run has {mine[key]!r}",
                    fix=f"resume with the same {key}, or start a new run",
                )
        self._next = int(state["ordinal"])
