"""A run's models and training stages, made again from its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from rlctl.errors import RlctlError
from rlctl.experience.event_log import EventLog
from rlctl.model.base import ModelEngine
from rlctl.model.loading import stop_tokens
from rlctl.runtime.cluster.supported import needs_processes
from rlctl.runtime.model_sources import find_sources
from rlctl.runtime.models import load_models
from rlctl.runtime.models_beside import ModelsBeside, passes_of
from rlctl.runtime.ranks.starting import start_ranks
from rlctl.runtime.threads import thread_count
from rlctl.runtime.trained_model import memory_of, trained_model
from rlctl.schema import Config
from rlctl.trainers.algorithm import Algorithm
from rlctl.trainers.training import TrainingStages


class Rebuilt:
    """What trains in a run, without what generates; at first as the run began, at version 0.

    Args:
        config: resolved.
        total_steps: of the whole run, for the schedule.
        stack: closing it ends the processes that were started.

    Attributes:
        model, reference, critic, algorithm: see ``Parts``.
        stages: of training, bound to them.
        model_config: transformers configuration of the model.
        stop_ids: tokens that end a response.
        version: of the weights; None when they are not those of a whole step.

    Raises:
        UsageError: a model is not where the configuration says.
        UnavailableError: this machine lacks what the run's engine needs.
    """

    def __init__(self, config: Config, total_steps: int, stack: ExitStack) -> None:
        self.config, self.total_steps = config, total_steps
        torch.set_num_threads(thread_count(config.run.threads))
        torch.use_deterministic_algorithms(True, warn_only=True)
        models = load_models(config, find_sources(config))
        updates = total_steps * updates_of(config)
        self.model_config, self.stop_ids = models.actor.model.config, stop_tokens(models.actor)
        self.trust_remote_code = config.model.trust_remote_code
        beside = ModelsBeside(config, models.reference, models.critic, updates)
        self.model: ModelEngine
        if needs_processes(config):
            self.model = start_ranks(
                config,
                models.actor.model.config,
                models.actor.source,
                total_updates=updates,
                memory=memory_of(config),
                logs=None,
                stack=stack,
            )
        else:
            self.model = trained_model(
                config,
                models.actor,
                EventLog(None),
                total_updates=updates,
                passes=passes_of(config),
                logs=None,
                stack=stack,
            )
        beside.stand_on(self.model, config)
        self.reference, self.critic = beside.reference, beside.critic
        self.algorithm = Algorithm(config)
        self.stages = TrainingStages(config, self.algorithm, self.model, self.reference, self.critic)
        self.version: int | None = 0

    def states(self) -> dict[str, Any]:
        """Return what ``load`` takes, as it is now."""
        states = {"model": self.model.state(), "algorithm": self.algorithm.state()}
        return states if self.critic is None else {**states, "critic": self.critic.state()}

    def load(self, step: int, states: Mapping[str, Any]) -> None:
        """Become what a checkpoint describes.

        Raises:
            RlctlError: it lacks a part, or its parameters are others.
        """
        parts: dict[str, Any] = {"model": self.model, "algorithm": self.algorithm}
        if self.critic is not None:
            parts["critic"] = self.critic
        if absent := sorted(parts.keys() - states.keys()):
            raise RlctlError(f"the checkpoint of step {step} has no state of: {', '.join(absent)}")
        self.version = None
        try:
            for name, part in parts.items():
                part.load(states[name])
        except (KeyError, TypeError, ValueError) as error:
            raise RlctlError(f"the checkpoint of step {step} is not this run's: {error}") from error
        self.version = step


def updates_of(config: Config) -> int:
    """Return the optimizer steps of a step, as the schedule counts them."""
    trainer = config.trainer
    return math.ceil(trainer.prompts_per_step / (trainer.mini_batch_prompts or trainer.prompts_per_step))
