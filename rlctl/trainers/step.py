"""The ten stages of a step, in their one order, and what they work on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rlctl.experience.groups import PromptGroup
from rlctl.experience.rows import Row

T = TypeVar("T")

STAGES = (
    "submit",
    "generate",
    "reward",
    "balance",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "update_critic",
    "update_actor",
)
"""A step submits once, then runs the other nine once for each local update (``trainer.parameter_sync_step``)."""

HOOKS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_validate_begin",
    "on_validate_end",
    "on_step_begin",
    "on_step_end",
    "on_sample_begin",
    "on_sample_end",
)


@dataclass
class StepState:
    """One step on its way through the stages.

    Attributes:
        number: from 1; the weights carry this version after it.
        round: which of the step's local updates is under way, from 0.
        stage: under way, or the last that was.
        target: prompts to train in it.
        groups: selected for the current local update.
        rows: their responses, sorted by key.
        mini_batches: rows of each optimizer step.
        micro_batches: of each, the passes of each rank, as row indexes within it.
        metrics: numbers to log; filled by the stages. Of one round while it is under way, then of the step.
        seconds: wall time by stage name.
        error: why the step failed, while its closing hooks run.
    """

    number: int
    round: int = 0
    stage: str = ""
    target: int = 0
    groups: list[PromptGroup] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    mini_batches: list[list[Row]] = field(default_factory=list)
    micro_batches: list[Sequence[Sequence[Sequence[int]]]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    error: BaseException | None = None

    def time(self, name: str, act: Callable[[], T]) -> T:
        """Run ``act`` and add its wall time to ``seconds[name]``."""
        begin = time.perf_counter()
        try:
            return act()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
