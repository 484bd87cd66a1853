"""Random rows of a step."""

from __future__ import annotations

import numpy as np

from rlctl.experience.records.columns import RoundRows, SegmentSpan
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey


def random_round(rng: np.random.Generator, count: int, *, first: int = 0, scored: bool = False) -> RoundRows:
    """Return ``count`` rows, some with observations, corrections and critics, and some without."""
    rows, segments = [], []
    critic, corrected = rng.random() < 0.5, rng.random() < 0.5
    for index in range(count):
        tokens = int(rng.integers(3, 9))
        floats = lambda: rng.standard_normal(tokens).astype(np.float32)  # noqa: B023, E731 - called at once
        cut = int(rng.integers(1, tokens - 1))
        observed = rng.random() < 0.4
        spans = [SegmentSpan(0, cut, 3, "0"), SegmentSpan(cut, cut + 1, 3, "0", 0, observed)]
        spans.append(SegmentSpan(cut + 1, tokens, 4, "1", int(observed)))
        segments.append(spans)
        row = Row(
            key=RequestKey(first + index // 2, index % 2, int(observed)),
            group=first + index // 2,
            prompt_ids=rng.integers(0, 99, int(rng.integers(1, 5))).tolist(),
            response_ids=rng.integers(0, 99, tokens).tolist(),
            reward=float(rng.random()),
            rollout_logprobs=floats(),
            versions=np.array([3] * (cut + 1) + [4] * (tokens - cut - 1), np.int64),
            advantages=floats(),
            turns=[(0, cut), (cut + 1, tokens)] if observed else [],
            observations=["what <b>it</b> said: \u00e9"] if observed else [],
            old_logprobs=floats() if corrected else None,
            values=floats() if critic else None,
            returns=floats() if critic else None,
            importance=floats() if corrected and index % 3 else None,
            train_logprobs=floats(),
            score=float(rng.random()) if scored else None,
        )
        if observed:
            row.rollout_logprobs[cut] = np.nan
        rows.append(row)
    scores = np.array([row.score for row in rows], np.float64) if scored else None
    return RoundRows(
        rows, [float(x) for x in rng.random(count)], [bool(x) for x in rng.random(count) < 0.3], segments, scores
    )


def same(a: Row, b: Row) -> bool:
    """Whether two rows are the same in all bits."""
    for name, mine in vars(a).items():
        theirs = getattr(b, name)
        if isinstance(mine, np.ndarray):
            if mine.dtype != theirs.dtype or mine.tobytes() != theirs.tobytes():
                return False
        elif mine != theirs:
            return False
    return True
