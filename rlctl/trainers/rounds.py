"""A step of several local updates is reported as one: how each figure of its rounds becomes one of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SUMS = (
    "prompts", "samples", "generated_tokens", "failed_rewards", "trained_tokens", "updates", "skipped_updates",
    "rollout_seconds", "aborted_requests", "aborted_tokens", "resumed_tokens", "groups_without_signal",
    "overlong_masked", "overlong_dropped", "critic/skipped_updates", "filter/generated_prompts",
    "filter/evicted_groups", "filter/kept_without_signal", "reward_model/seconds",
)  # fmt: skip
_LAST = ("lr", "kl_coef", "critic/lr")


def metrics_of_step(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of a step: counts are added up, ``..._max`` is the highest, rates of learning and weights are
    the last, and everything else is the mean over responses (of a task's own figures: over its responses)."""
    if len(rounds) == 1:
        return dict(rounds[0])
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {name: _of_step(name, [figures for figures in rounds if name in figures]) for name in names}


def _of_step(name: str, rounds: Sequence[Mapping[str, float]]) -> float:
    values = [figures[name] for figures in rounds]
    if name in _SUMS or (name.startswith("tasks/") and not name.endswith("/reward")):
        return sum(values)
    if name.endswith("_max"):
        return max(values)
    if name in _LAST:
        return values[-1]
    samples = f"{name.rpartition('/')[0]}/samples" if name.startswith("tasks/") else "samples"
    weights = [figures.get(samples, 1.0) for figures in rounds]
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else values[-1]
