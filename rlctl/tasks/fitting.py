"""A task without the prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

from rlctl.errors import UsageError
from rlctl.tasks.base import Sample, Task, TaskOptions
from rlctl.tasks.counter import draw

_ATTEMPTS = 1000


class FittingTask(Task):
    """The prompts of another task for which ``fits`` holds, in its order. Scores are the other task's.

    A finite task is looked through once. Of an endless one, a prompt that does not fit is replaced by another, which
    depends on its number alone.
    """

    def __init__(self, inner: Task, fits: Callable[[Sample], bool]) -> None:
        self.name = inner.name
        self.verifier = inner.verifier
        self.stepper = inner.stepper
        self._inner = inner
        self._fits = fits
        self._kept = None if inner.size is None else [i for i in range(inner.size) if fits(inner.sample(i))]
        self.digest = inner.digest if self._kept is None else f"{inner.digest}+{_digest(self._kept)}"

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> FittingTask:  # noqa: ARG003
        """Not made by name. Raises UsageError."""
        raise UsageError(f"{name} is no task", where="task.name")

    @property
    def size(self) -> int | None:
        return None if self._kept is None else len(self._kept)

    @property
    def several_turns(self) -> bool:
        return self._inner.several_turns

    @property
    def dropped(self) -> int:
        """Training prompts of a finite task that are left out."""
        return 0 if self._kept is None else (self._inner.size or 0) - len(self._kept)

    def sample(self, index: int) -> Sample:
        if self._kept is not None:
            return replace(self._inner.sample(self._kept[index]), index=index)
        for attempt in range(_ATTEMPTS):
            found = self._inner.sample(index if attempt == 0 else draw(index, attempt) >> 11)
            if self._fits(found):
                return replace(found, index=index)
        raise UsageError(
            f"none of {_ATTEMPTS} prompts of task {self.name!r} is short enough",
            where="task.max_prompt_tokens",
            fix="raise it",
        )

    def held_out(self, n: int) -> list[Sample]:
        return [sample for sample in self._inner.held_out(n) if self._fits(sample)]

    def score(self, sample: Sample, response_text: str) -> float:
        return self._inner.score(sample, response_text)

    def metrics(self, sample: Sample, response_text: str) -> dict[str, float]:
        return self._inner.metrics(sample, response_text)


def _digest(kept: Sequence[int]) -> str:
    return blake2b(",".join(map(str, kept)).encode(), digest_size=8).hexdigest()
