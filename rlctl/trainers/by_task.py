"""What a step of several tasks gave, task by task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlctl.experience.groups import PromptGroup

PREFIX = "tasks/"


def task_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Return prompts, samples and mean reward of each task of a mixture, as ``tasks/NAME/...``; nothing for one task.

    Every response of the trained groups counts, those that an over-long policy leaves out too.
    """
    metrics: dict[str, float] = {}
    for task in sorted({group.task for group in groups} - {""}):
        mine = [group for group in groups if group.task == task]
        rewards = [response.reward for group in mine for response in group.ordered]
        metrics[f"{PREFIX}{task}/prompts"] = float(len(mine))
        metrics[f"{PREFIX}{task}/samples"] = float(len(rewards))
        metrics[f"{PREFIX}{task}/reward"] = float(np.mean([reward for reward in rewards if reward is not None]))
    return metrics
