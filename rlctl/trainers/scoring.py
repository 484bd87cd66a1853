"""The reward model's part of the reward stage."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlctl.algorithms.reward_mix import mix_rewards
from rlctl.experience.events import Scored
from rlctl.experience.rows import Row
from rlctl.schema.reward_model import RewardModelConfig
from rlctl.trainers.parts import Parts
from rlctl.trainers.step import StepState


def add_scores(rows: Sequence[Row], step: StepState, parts: Parts) -> dict[str, float]:
    """Make each row's reward out of the task's and the model's, tell both, and return metrics. Raises RlctlError."""
    assert parts.reward_model is not None
    begin = time.perf_counter()
    scores, cut = parts.reward_model.scores(rows, {group.ordinal: group.row for group in step.groups})
    seconds = time.perf_counter() - begin
    task = [row.reward for row in rows]
    metrics = mix_in(rows, scores, parts.config.reward_model)
    parts.events.emit(
        Scored(
            step=step.number,
            seconds=seconds,
            keys=[(row.key.ordinal, row.key.sample, row.key.turn) for row in rows],
            task=task,
            scores=scores.tolist(),
            rewards=[row.reward for row in rows],
        )
    )
    return metrics | {"reward_model/overlong": cut / len(rows), "reward_model/seconds": seconds}


def mix_in(rows: Sequence[Row], scores: npt.NDArray[np.floating], settings: RewardModelConfig) -> dict[str, float]:
    """Make each row's reward, until now the task's alone, out of that and its score; return metrics."""
    task = np.array([row.reward for row in rows], np.float64)
    mixed = mix_rewards(task, scores.astype(np.float64), settings)
    for row, reward, score in zip(rows, mixed.rewards.tolist(), scores.tolist(), strict=True):
        row.reward, row.score = reward, score
    return mixed.metrics
