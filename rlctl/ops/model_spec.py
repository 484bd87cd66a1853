"""The architecture of the model that a configuration names, without loading it."""

from __future__ import annotations

from rlctl.errors import UsageError
from rlctl.keys.model_spec import ModelSpec
from rlctl.memory.beside import BesideModels
from rlctl.ops.planned_model import planned_model
from rlctl.schema import Config
from rlctl.trainers.memory_phases import has_reference


def spec_of(path: str) -> ModelSpec:
    """Return the spec of ``model.path``; see ``planned_model`` for what it may be.

    Raises UsageError when the model is not known here, or only the headers of its files are.
    """
    found = planned_model(path, where="model.path")
    if found.spec is None:
        raise UsageError(
            f"{found.source} says the weights of {path}, not its heads",
            where="model.path",
            fix="give the folder of its config.json, or that file",
        )
    return found.spec


def models_beside(config: Config, actor: ModelSpec) -> tuple[BesideModels, list[str]]:
    """Return the models beside the actor, and a note on each that is not known here and so not counted."""
    notes: list[str] = []

    def known(path: str, what: str) -> ModelSpec | None:
        try:
            return spec_of(path)
        except UsageError as error:
            notes.append(f"{what} {path} is not counted: {error.message}")
            return None

    reference, critic, reward = config.algorithm.kl.reference, config.algorithm.critic.model, config.reward_model
    beside = BesideModels(
        reference=(known(reference, "the reference model") if reference else actor) if has_reference(config) else None,
        critic=actor if critic == "actor" else known(critic, "the critic") if critic else None,
        reward=known(reward.path, "the reward model") if reward.path else None,
        reward_bytes=2 if reward.dtype == "bfloat16" else 4,
    )
    return beside, notes
