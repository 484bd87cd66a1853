"""What is to be said of conversations beyond what holds for any response."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlctl.experience.rows import Row


def turn_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Return the model's turns and the observed tokens of a conversation, on average; nothing when none has a second
    turn."""
    if all(len(row.turns) == 1 for row in rows):
        return {}
    observed = [len(row.response_ids) - int(row.sampled.sum()) for row in rows]
    return {
        "turns": float(np.mean([len(row.turns) for row in rows])),
        "turns_max": float(max(len(row.turns) for row in rows)),
        "observation_tokens": float(np.mean(observed)),
    }
