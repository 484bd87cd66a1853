"""How old the tokens of a train batch are, in weight versions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlctl.experience.rows import Row


def staleness(rows: Sequence[Row], version: int) -> dict[str, float]:
    """Return how far ``version``, that of the weights being trained, is ahead of what made the rows.

    ``staleness`` is that of each response's oldest token, on average; ``staleness_max`` the highest of any token;
    ``staleness_tokens`` the mean over all tokens that the model made.
    """
    oldest = [version - int(row.versions[row.sampled].min()) for row in rows]
    tokens = np.concatenate([version - row.versions[row.sampled] for row in rows])
    return {
        "staleness": float(np.mean(oldest)),
        "staleness_max": float(np.max(oldest)),
        "staleness_tokens": float(tokens.mean()),
    }
