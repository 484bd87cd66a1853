"""Loading the models of a run: the actor and what stands beside it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from rlctl.errors import UsageError
from rlctl.model.loading import LoadedModel, load_model
from rlctl.schema import Config


class Sources(Protocol):
    """See ``ModelSources``."""

    @property
    def model(self) -> str: ...
    @property
    def reference(self) -> str | None: ...
    @property
    def critic(self) -> str | None: ...


@dataclass(frozen=True)
class Models:
    """Models in float32 on the CPU.

    Attributes:
        actor: with its tokenizer.
        reference: a causal LM that stays as it is, or None; also for a run whose reference is the actor's own model
            under its adapter.
        critic: a causal LM whose body the critic takes over, or None.
    """

    actor: LoadedModel
    reference: Any = None
    critic: Any = None


def load_models(config: Config, sources: Sources) -> Models:
    """Load the models that ``config`` asks for, none of which shares a tensor with another.

    Raises:
        UsageError: a folder that does not load, or whose vocabulary is not the actor's.
    """
    actor = load_model(sources.model, trust_remote_code=config.model.trust_remote_code)
    require_same_vocabulary(actor)
    algorithm = config.algorithm
    apart = algorithm.kl.place != "none" and not (config.model.lora.rank and sources.reference is None)
    return Models(
        actor,
        reference=_beside(actor, sources.reference, "algorithm.kl.reference", config) if apart else None,
        critic=_beside(actor, sources.critic, "algorithm.critic.model", config) if algorithm.critic.model else None,
    )


def _beside(actor: LoadedModel, source: str | None, key: str, config: Config) -> Any:
    """Return a copy of the actor's model, or the one in ``source``, which must read the actor's tokens."""
    if source is None:
        return deepcopy(actor.model)
    head = key.endswith("reference")
    other = load_model(source, trust_remote_code=config.model.trust_remote_code, where=key, head=head)
    if other.tokenizer.get_vocab() != actor.tokenizer.get_vocab():
        raise UsageError(
            f"the vocabulary of {source} is not the actor's, so it cannot read the actor's tokens",
            where=key,
            fix="give a model with the actor's tokenizer, or leave the key unset for a copy of the actor"
            if head
            else "give a model with the actor's tokenizer, or set the key to actor",
        )
    return other.model


def require_same_vocabulary(loaded: LoadedModel) -> None:
    """Raise UsageError when the tokenizer has tokens that the model has no embedding for."""
    rows, tokens = loaded.model.get_input_embeddings().weight.shape[0], len(loaded.tokenizer)
    if tokens > rows:
        raise UsageError(
            f"the tokenizer has {tokens} tokens, and the model embeds {rows}",
            where="model.path",
            fix="give the folder whose tokenizer and weights belong together",
        )
