"""A response's reward out of what its task and a reward model say of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlctl.schema.reward_model import RewardModelConfig

Doubles = npt.NDArray[np.float64]
_TINY = 1e-6


@dataclass(frozen=True)
class Mixed:
    """Rewards of a train batch, float64, with metrics; ``reward`` is ``reward/task`` + ``reward/model``."""

    rewards: Doubles
    metrics: dict[str, float]


def mix_rewards(task: Doubles, scores: Doubles, settings: RewardModelConfig) -> Mixed:
    """Return ``task_weight`` x task + ``weight`` x clip(normalize(score)) for each response.

    Args:
        task: the task's own rewards, finite.
        scores: the model's, finite, in the same order.
        settings: weights, normalisation and clip.
    """
    shaped = normalised(scores, settings.normalize)
    cut = np.zeros(len(scores), np.bool_)
    if settings.clip is not None:
        cut = np.abs(shaped) > settings.clip
        shaped = np.clip(shaped, -settings.clip, settings.clip)
    of_task, of_model = settings.task_weight * task, settings.weight * shaped
    metrics = {
        "task_reward": float(task.mean()),
        "reward/task": float(of_task.mean()),
        "reward/model": float(of_model.mean()),
        "reward_model/mean": float(scores.mean()),
        "reward_model/std": float(scores.std()),
        "reward_model/min": float(scores.min()),
        "reward_model/max": float(scores.max()),
        "reward_model/clipped": float(cut.mean()),
    }
    return Mixed(of_task + of_model, metrics)


def normalised(scores: Doubles, how: str) -> Doubles:
    """Return the scores as they are (``none``), as 1 / (1 + e^-score) (``sigmoid``), or less their mean over their
    deviation + 1e-6 (``batch``)."""
    if how == "sigmoid":
        return np.asarray(0.5 * (1.0 + np.tanh(0.5 * scores)))
    if how == "batch":
        return np.asarray((scores - scores.mean()) / (scores.std() + _TINY))
    return scores
