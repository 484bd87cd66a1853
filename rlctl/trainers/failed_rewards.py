"""Rewards that could not be had: told by reason and prompt; when none of a step can be used, the run ends."""

from __future__ import annotations

from collections.abc import Iterator

from rlctl.errors import RlctlError
from rlctl.rollout.rollouter import RolloutStats
from rlctl.tasks.outcome import unusable

REASONS_TOLD = 3
"""So many reasons of failed rewards a step tells; the others it counts."""


def failure_messages(stats: RolloutStats) -> Iterator[str]:
    """Yield the commonest reasons with their counts and the first prompt of each, then how many others there were."""
    # Reasons may quote the response, so there can be as many as there are responses.
    commonest = sorted(stats.failed_rewards.items(), key=lambda item: -item[1])
    for reason, count in commonest[:REASONS_TOLD]:
        first = stats.first_failed[reason]
        yield f"{count} of {stats.responses} rewards failed ({reason}; first: {first}) and count as 0"
    if others := sum(count for _, count in commonest[REASONS_TOLD:]):
        yield f"{others} more rewards failed for other reasons and count as 0"


def require_usable_rewards(stats: RolloutStats) -> None:
    """Raise RlctlError when the reward function answered every call with something that is no usable number."""
    reasons = [reason for reason in stats.failed_rewards if unusable(reason)]
    if not reasons or sum(stats.failed_rewards[reason] for reason in reasons) < stats.responses:
        return
    first = f"{stats.first_failed[reasons[0]]}: {reasons[0]}"
    raise RlctlError(
        f"none of the {stats.responses} rewards of the step can be used; of {first}",
        where="task.verifier",
        fix="mend the function: it returns one finite number, or a mapping with 'reward'",
    )
