"""What a run reads: found and checked before anything slow is imported or anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlctl.errors import UsageError
from rlctl.model.locate import find_adapter, find_model
from rlctl.ops.load_tasks import load_tasks
from rlctl.schema import Config
from rlctl.tasks.base import Task
from rlctl.tasks.builtin_models import builtin_model_path
from rlctl.tasks.mixture import cursor_for


@dataclass(frozen=True)
class Inputs:
    """Models and task of a run.

    Attributes:
        model: what ``from_pretrained`` is given.
        task: loaded.
        reference, critic, reward_model: what ``from_pretrained`` is given for them; None for a copy of the model, or
            for none.
    """

    model: str
    task: Task
    reference: str | None = None
    critic: str | None = None
    reward_model: str | None = None


def find_inputs(config: Config) -> Inputs:
    """Find the models, and data with something to train on. Raises UsageError or UnavailableError."""
    task = load_tasks(config)
    cursor = cursor_for(task, config.run.seed, config.task.epochs)
    steps_in_all(config, cursor.remaining)
    critic = config.algorithm.critic.model
    if config.model.lora.adapter is not None:
        find_adapter(config.model.lora.adapter)
    return Inputs(
        _find(config.model.path, "model.path"),
        task,
        reference=_find_optional(config.algorithm.kl.reference, "algorithm.kl.reference"),
        critic=_find_optional(None if critic == "actor" else critic, "algorithm.critic.model"),
        reward_model=_find_optional(config.reward_model.path, "reward_model.path"),
    )


def _find(path: str, where: str) -> str:
    return find_model(path, builtin_model_path(path), where=where)


def _find_optional(path: str | None, where: str) -> str | None:
    return None if path is None else _find(path, where)


def steps_in_all(config: Config, prompts: int | None) -> int:
    """Return the steps of the run: ``run.steps``, or as many as the data gives when it ends before.

    Raises:
        UsageError: the data has no prompt to train on.
    """
    if prompts is None:
        return config.run.steps
    if prompts == 0:
        raise UsageError("the task has no prompt to train on", where="task.name")
    if config.task.epochs is None:
        return config.run.steps
    return min(config.run.steps, math.ceil(prompts / config.trainer.prompts_per_step))
