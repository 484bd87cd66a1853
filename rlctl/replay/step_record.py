"""What a replay needs of a recorded step, whatever it was read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlctl.experience.rows import Row
from rlctl.schema import Config


@dataclass(frozen=True)
class SegmentRecord:
    """Tokens of a response made in one go: ``begin`` to ``end`` within the response, none of them observed."""

    begin: int
    end: int
    version: int
    replica: str


@dataclass(frozen=True)
class RoundRecord:
    """A local update.

    Attributes:
        rows: as they were after it.
        task_rewards: of each row, before a reward model's score was mixed in.
        scores: the reward model's, None without one.
        cut: of each row, whether its response was cut at its longest length.
        segments: of each row, in order.
        mini_batches: row indexes of each optimizer step, in order.
        micro_batches: row indexes of each pass of each rank of each optimizer step; empty where not recorded.
        metrics: of its stages.
        kl_coef: weight of the KL that it began with.
    """

    rows: Sequence[Row]
    task_rewards: Sequence[float]
    cut: Sequence[bool]
    segments: Sequence[Sequence[SegmentRecord]]
    mini_batches: Sequence[Sequence[int]]
    metrics: Mapping[str, float]
    kl_coef: float
    scores: np.ndarray | None = None
    micro_batches: Sequence[Sequence[Sequence[Sequence[int]]]] = ()


@dataclass(frozen=True)
class StepRecord:
    """A trained step.

    Attributes:
        step: its number; the weights carry this version after it.
        config: that it was trained under.
        rounds: its local updates.
        params_digest: of the parameters after it; empty where not recorded.
        fingerprint: what it was computed with.
        total_steps: of the run, for the schedule.
    """

    step: int
    config: Config
    rounds: Sequence[RoundRecord]
    params_digest: str
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int = 1


class Source(Protocol):
    """A recorded run."""

    @property
    def steps(self) -> Sequence[int]:
        """Steps with a record, in order."""

    @property
    def checkpoints(self) -> Sequence[int]:
        """Steps after which there is a checkpoint, in order."""

    def step(self, number: int) -> StepRecord:
        """Return a step's record. Raises RlctlError when it cannot be read."""

    def states(self, number: int) -> Mapping[str, Any]:
        """Return what a checkpoint holds, by part. Raises RlctlError when it cannot be read, or changed."""
