"""Ranks that carry more than the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TOLERANCE = 0.02
"""Share of the median above which a rank is told of."""
HINTS = ("a full state_dict gathered on it", "broadcast buffers of the weight sync", "logits or metrics gathered on it")


@dataclass(frozen=True)
class Heavier:
    """A rank with more than the median.

    Attributes:
        rank: its position.
        nbytes: what it carries; ``above`` of it more than the median.
    """

    rank: int
    nbytes: float
    above: float


def heavier_ranks(nbytes: Sequence[float]) -> list[Heavier]:
    """Return the ranks that carry more than the median and ``TOLERANCE`` of it, in order."""
    if not nbytes:
        return []
    middle = median(nbytes)
    return [Heavier(i, n, n - middle) for i, n in enumerate(nbytes) if n > middle * (1 + TOLERANCE)]
