"""What is to be said of a train batch before it is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlctl.experience.rows import Row
from rlctl.trainers.by_turn import turn_metrics
from rlctl.trainers.staleness import staleness


def batch_figures(rows: Sequence[Row], version: int) -> dict[str, float]:
    """Return samples, rewards, lengths, ages and turns of a batch that the weights of ``version`` are trained on."""
    rewards = [row.reward for row in rows]
    lengths = [len(row.response_ids) for row in rows]
    return {
        "samples": float(len(rows)),
        "reward": float(np.mean(rewards)),
        "reward_std": float(np.std(rewards)),
        "response_tokens": float(np.mean(lengths)),
        "response_tokens_max": float(np.max(lengths)),
        **staleness(rows, version),
        **turn_metrics(rows),
    }
