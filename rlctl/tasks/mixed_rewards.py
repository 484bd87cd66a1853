"""Scores of a mixture: each member's own way of scoring, whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rlctl.tasks.base import Message, Sample, Score, Task
from rlctl.tasks.mixture import MixtureTask
from rlctl.tasks.rewarding import RewardScorer, Scorer, Tell, log


class MixedScorer(Scorer):
    """A ``RewardScorer`` for each member; see there for the arguments."""

    def __init__(
        self, task: MixtureTask, timeout_s: float, output: Path | None = None, tell: Tell = log.warning
    ) -> None:
        self._scorers: dict[str, RewardScorer] = {}
        with ExitStack() as stack:
            for label, member in task.members.items():
                self._scorers[label] = stack.enter_context(RewardScorer(member.task, timeout_s, output, tell))
            self._stack = stack.pop_all()

    def score(self, batch: Sequence[tuple[Sample, str]]) -> list[Score]:
        return [self._scorers[sample.task].score([(sample, text)])[0] for sample, text in batch]

    def step(self, batch: Sequence[tuple[Sample, Sequence[Message]]]) -> list[Score]:
        return [self._scorers[sample.task].step([(sample, messages)])[0] for sample, messages in batch]

    def close(self) -> None:
        self._stack.close()


def scorer_for(task: Task, timeout_s: float, output: Path | None = None, tell: Tell = log.warning) -> Scorer:
    """Return what scores responses to any task. See ``RewardScorer`` for the arguments and errors."""
    if isinstance(task, MixtureTask):
        return MixedScorer(task, timeout_s, output, tell)
    return RewardScorer(task, timeout_s, output, tell)
