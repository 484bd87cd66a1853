"""Which prompt groups have something to teach."""

from __future__ import annotations

from collections.abc import Sequence


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ: one whose rewards are all alike has no advantage to learn from (DAPO,
    arXiv 2503.14476, section 3.2)."""
    return any(reward != rewards[0] for reward in rewards)
