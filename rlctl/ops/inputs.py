"""What a run reads: found and checked before anything slow is imported or anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlctl.errors import UsageError
from rlctl.model.descriptions import read_description, require_classifier, require_language_model, require_weights
from rlctl.model.fsdp2.tensor_sizes import check_tensor_parallel
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


def find_actor(config: Config, *, ask_hub: bool = True) -> str:
    """Return the model that is trained. Raises UsageError or UnavailableError, as the others here do."""
    source = _language_model(config.model.path, "model.path", ask_hub=ask_hub)
    description = read_description(source, "model.path")
    if description is not None and config.model.engine == "fsdp2":
        check_tensor_parallel(description, config.placement.trainer_tp)
    return source


def find_reference(config: Config, *, ask_hub: bool = True) -> str | None:
    """Return the reference model, None for a copy of the actor or none."""
    path = config.algorithm.kl.reference
    return None if path is None else _language_model(path, "algorithm.kl.reference", ask_hub=ask_hub)


def find_critic(config: Config, *, ask_hub: bool = True) -> str | None:
    """Return the model whose body the critic takes over, None for a copy of the actor's or none."""
    path = config.algorithm.critic.model
    return None if path is None or path == "actor" else _find(path, "algorithm.critic.model", ask_hub=ask_hub)


def find_reward_model(config: Config, *, ask_hub: bool = True) -> str | None:
    """Return the reward model, or None."""
    settings = config.reward_model
    if settings.path is None:
        return None
    source = _find(settings.path, "reward_model.path", ask_hub=ask_hub)
    require_classifier(source, settings.output)
    return source


def find_lora_adapter(config: Config) -> str | None:
    """Return the folder of the adapter to begin with, or None."""
    return None if config.model.lora.adapter is None else find_adapter(config.model.lora.adapter)


def _language_model(path: str, where: str, *, ask_hub: bool) -> str:
    source = _find(path, where, ask_hub=ask_hub)
    require_language_model(source, where)
    return source


def _find(path: str, where: str, *, ask_hub: bool) -> str:
    source = find_model(path, builtin_model_path(path), where=where, ask_hub=ask_hub)
    require_weights(source, where)
    return source


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
