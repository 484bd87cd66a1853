"""What a run of several tasks came to, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.trainers.by_task import PREFIX


def task_results(lines: Sequence[Mapping[str, float]], *, first: int, last: int) -> dict[str, Any]:
    """Return each task's prompts in all, and its mean reward over the first and last steps that had any of it.

    Args:
        lines: metrics of the steps, in order.
        first, last: so many steps.
    """
    results = {}
    for task in sorted({name[len(PREFIX) :].rpartition("/")[0] for line in lines for name in line if _is_reward(name)}):
        mine = [line for line in lines if f"{PREFIX}{task}/reward" in line]
        rewards = [line[f"{PREFIX}{task}/reward"] for line in mine]
        results[task] = {
            "prompts": int(sum(line[f"{PREFIX}{task}/prompts"] for line in mine)),
            "reward": {"first": _mean(rewards[:first]), "last": _mean(rewards[-last:])},
        }
    return results


def _is_reward(name: str) -> bool:
    return name.startswith(PREFIX) and name.endswith("/reward")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
