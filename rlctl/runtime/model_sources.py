"""Where the models of a run are: found and checked before anything slow is imported."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.model.descriptions import read_description, require_language_model, require_weights
from rlctl.model.fsdp2.tensor_sizes import check_tensor_parallel
from rlctl.model.locate import find_model
from rlctl.schema import Config
from rlctl.tasks.builtin_models import builtin_model_path


@dataclass(frozen=True)
class ModelSources:
    """What ``from_pretrained`` is given.

    Attributes:
        model: of the model that is trained.
        reference, critic: of those; None for a copy of the model, or for none.
    """

    model: str
    reference: str | None = None
    critic: str | None = None


def find_sources(config: Config) -> ModelSources:
    """Find all models that are trained or stand beside. Raises UsageError or UnavailableError."""
    return ModelSources(find_actor(config), find_reference(config), find_critic(config))


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
    return None if path is None or path == "actor" else find_weights(path, "algorithm.critic.model", ask_hub=ask_hub)


def _language_model(path: str, where: str, *, ask_hub: bool) -> str:
    source = find_weights(path, where, ask_hub=ask_hub)
    require_language_model(source, where)
    return source


def find_weights(path: str, where: str, *, ask_hub: bool) -> str:
    """Return what ``from_pretrained`` is given for a model with weights. Raises UsageError or UnavailableError."""
    source = find_model(path, builtin_model_path(path), where=where, ask_hub=ask_hub)
    require_weights(source, where)
    return source
