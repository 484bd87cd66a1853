"""Models that stand beside the actor, in the run's own process: a reference and a critic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlctl.model.bare_base import Adapted, BareBase
from rlctl.model.base import ModelEngine
from rlctl.model.critic.base import Critic
from rlctl.model.critic.local import LocalCritic
from rlctl.model.reference import Reference, ReferenceModel
from rlctl.schema import Config


def device_of(config: Config) -> str:
    """Return the device that this process computes on, as torch names it."""
    return {"cpu": "cpu", "cuda": "cuda", "npu": "npu"}[config.cluster.device]


def passes_of(config: Config) -> dict[str, Any]:
    """Return how rows go through a model in this process."""
    return {
        "dtype": config.model.dtype,
        "micro_batch_tokens": config.trainer.micro_batch_tokens,
        "device": device_of(config),
    }


class ModelsBeside:
    """What there is of them.

    Args:
        config: resolved.
        reference: a causal LM that the policy is held near, or None.
        critic: a causal LM whose body the critic takes over, or None.
        total_updates: optimizer steps of the whole run, for the schedule.
    """

    def __init__(self, config: Config, reference: Any, critic: Any, total_updates: int) -> None:
        passes = passes_of(config)
        self.reference: Reference | None = None if reference is None else ReferenceModel(reference, **passes)
        self.critic: Critic | None = None
        if critic is not None:
            settings = replace(config.trainer.optimizer, lr=config.algorithm.critic.lr)
            self.critic = LocalCritic(critic, settings, total_updates=total_updates, **passes)

    def stand_on(self, model: ModelEngine, config: Config) -> None:
        """Where no reference was named: the one of a model that trains an adapter is itself without it."""
        if self.reference is None and config.algorithm.kl.place != "none" and isinstance(model, Adapted):
            self.reference = BareBase(model)

    def offload(self) -> None:
        """Give device memory back."""
        for beside in (self.reference, self.critic):
            if beside is not None:
                beside.offload()

    def onload(self) -> None:
        """Undo ``offload``."""
        for beside in (self.reference, self.critic):
            if beside is not None:
                beside.onload()
