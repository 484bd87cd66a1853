"""Whether log-probs stand beside the tokens that they are of: a model that is near the one that made them can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlctl.errors import Finding

MOST_SHIFT = 3
_LEAST_TOKENS = 8
_PLAIN = 0.05
"""A mean gap, in nats, up to which log-probs are as they should be, whatever another shift would give."""
_TIMES = 4.0
"""So many times smaller the mean gap of another shift must be, to say that it is the right one."""

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Alignment:
    """The shift that fits best, and the mean gaps, in nats a token, as the log-probs stand and shifted."""

    shift: int
    gap: float
    shifted_gap: float

    @property
    def wrong(self) -> bool:
        """Whether another shift fits so much better that the log-probs are not those of their tokens."""
        return self.shift != 0 and self.gap > _PLAIN and self.gap > _TIMES * self.shifted_gap


def align(recorded: Sequence[Floats], computed: Sequence[Floats]) -> Alignment | None:
    """Return how recorded log-probs stand beside those that a model gives the same tokens, over all responses
    together; None where there are too few tokens to tell.

    A shift of +1 means that each log-prob stands one token behind its own: entry i + 1 is of token i.
    """
    gaps: dict[int, float] = {}
    for shift in range(-MOST_SHIFT, MOST_SHIFT + 1):
        parts = [_gaps(np.asarray(a), np.asarray(b), shift) for a, b in zip(recorded, computed, strict=True)]
        flat = np.concatenate(parts) if parts else np.zeros(0)
        flat = flat[np.isfinite(flat)]
        if flat.size < _LEAST_TOKENS - MOST_SHIFT:
            return None
        gaps[shift] = float(flat.mean())
    best = min(gaps, key=lambda shift: (gaps[shift], abs(shift), shift))
    return Alignment(best, gaps[0], gaps[best])


def misaligned(
    recorded: Sequence[Floats], computed: Sequence[Floats], places: Sequence[str]
) -> tuple[list[Finding], float | None]:
    """Return the responses whose log-probs are shifted, and the mean gap of all in nats a token (None: too few tokens).

    Each response that is long enough is looked at by itself; short ones count in the whole only.
    """
    findings = []
    for mine, theirs, place in zip(recorded, computed, places, strict=True):
        one = align([mine], [theirs]) if len(mine) >= _LEAST_TOKENS else None
        if one is not None and one.wrong:
            findings.append(_finding(one, place))
    whole = align(recorded, computed)
    if whole is not None and whole.wrong and not findings:
        findings.append(_finding(whole, "all responses together"))
    return findings, None if whole is None else whole.gap


def _finding(found: Alignment, place: str) -> Finding:
    return Finding(
        f"log-probs do not belong to their tokens: shifted by {found.shift:+d} they fit best ({found.shifted_gap:.3g} "
        f"nats a token from this model's, {found.gap:.3g} as they stand)",
        place,
        "write each log-prob beside its own token",
    )


def _gaps(recorded: Floats, computed: Floats, shift: int) -> Floats:
    count = len(recorded) - abs(shift)
    if count <= 0:
        return np.zeros(0)
    begin, other = max(shift, 0), max(-shift, 0)
    gaps: Floats = np.abs(recorded[begin : begin + count] - computed[other : other + count])
    return gaps
