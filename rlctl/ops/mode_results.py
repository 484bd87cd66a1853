"""What a run's mode came to: how stale its data was, how long each side waited, what its syncs cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, float]


def mode_results(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the figures of the steps as those of the run.

    - ``staleness``: weight versions between making and training: ``mean`` of the oldest token of each response,
      ``max`` of any token, ``tokens`` the mean over all tokens.
    - ``bubble``: share of the time in which a side did no work of its own: ``trainer``, ``rollout``.
    - ``sync``: ``count``, ``seconds`` of all, ``stall_seconds`` in which replicas served nothing because of them.
    - ``logprob_gap``: absolute difference of the log-probs of trainer and rollout: ``mean`` over tokens, ``max``.

    Args:
        lines: metrics of the steps, in order; what no step has is None.
    """
    return {
        "staleness": {
            "mean": _mean(lines, "staleness", "samples"),
            "max": _max(lines, "staleness_max"),
            "tokens": _mean(lines, "staleness_tokens", "samples"),
        },
        "bubble": {
            "trainer": _mean(lines, "bubble_trainer", "seconds"),
            "rollout": _mean(lines, "bubble_rollout", "seconds"),
        },
        "sync": {
            "count": int(sum(line.get("syncs", 0.0) for line in lines)),
            "seconds": sum(line.get("sync_seconds", 0.0) for line in lines),
            "stall_seconds": sum(line.get("sync_stall_seconds", 0.0) for line in lines),
        },
        "logprob_gap": {
            "mean": _mean(lines, "logprob_gap", "trained_tokens"),
            "max": _max(lines, "logprob_gap_max"),
        },
    }


def _mean(lines: Sequence[Line], name: str, weight: str) -> float | None:
    found = [(line[name], line[weight]) for line in lines if name in line and line.get(weight)]
    total = sum(share for _, share in found)
    return sum(value * share for value, share in found) / total if total else None


def _max(lines: Sequence[Line], name: str) -> float | None:
    return max((line[name] for line in lines if name in line), default=None)
