"""What a run reads: found and checked before anything slow is imported or anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlctl.errors import UsageError
from rlctl.model.descriptions import require_classifier
from rlctl.model.locate import find_adapter
from rlctl.ops.load_tasks import load_tasks
from rlctl.runtime.model_sources import find_actor, find_critic, find_reference, find_weights
from rlctl.schema import Config
from rlctl.tasks.base import Task
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
    task = find_task(config)
    find_lora_adapter(config)
    return Inputs(
        find_actor(config),
        task,
        reference=find_reference(config),
        critic=find_critic(config),
        reward_model=find_reward_model(config),
    )


def find_task(config: Config) -> Task:
    """Return the task, which has a prompt to train on. Raises UsageError or UnavailableError."""
    task = load_tasks(config)
    steps_in_all(config, cursor_for(task, config.run.seed, config.task.epochs).remaining)
    return task


def find_reward_model(config: Config, *, ask_hub: bool = True) -> str | None:
    """Return the reward model, or None."""
    settings = config.reward_model
    if settings.path is None:
        return None
    source = find_weights(settings.path, "reward_model.path", ask_hub=ask_hub)
    require_classifier(source, settings.output)
    return source


def find_lora_adapter(config: Config) -> str | None:
    """Return the folder of the adapter to begin with, or None."""
    return None if config.model.lora.adapter is None else find_adapter(config.model.lora.adapter)


def steps_in_all(config: Config, prompts: int | None, *, ends: bool = False) -> int:
    """Return the steps of the run: ``run.steps``, or as many as the data gives when it ends before.

    Args:
        prompts: left in the data; None when it has no end.
        ends: whether it ends although ``task.epochs`` is not set.

    Raises:
        UsageError: the data has no prompt to train on.
    """
    if prompts is None:
        return config.run.steps
    if prompts == 0:
        raise UsageError("the task has no prompt to train on", where="task.name")
    if config.task.epochs is None and not ends:
        return config.run.steps
    return min(config.run.steps, math.ceil(prompts / config.trainer.prompts_per_step))
