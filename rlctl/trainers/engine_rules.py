"""What must hold between the model engine and the trainer's ranks. Each rule is one small pure function."""

from __future__ import annotations

from rlctl.errors import Finding
from rlctl.schema import Config
from rlctl.trainers.rules import Rule

SPREADING = ("fsdp2", "megatron")
"""Engines whose model lies on several ranks."""


def model_engine(config: Config) -> str:
    """Return the model engine of a configuration that names none."""
    return "fsdp2" if config.placement.trainer_ranks > 1 else "local"


def engine_spreads_over_ranks(config: Config) -> Finding | None:
    engine, ranks = config.model.engine, config.placement.trainer_ranks
    if ranks == 1 or engine in SPREADING:
        return None
    return Finding(
        f"model engine {engine} holds the whole model on one rank, and the trainer has {ranks}",
        "model.engine",
        "set model.engine=fsdp2 or placement.trainer_ranks=1",
    )


def adapter_is_on_one_rank(config: Config) -> Finding | None:
    if not config.model.lora.rank or config.model.engine not in SPREADING:
        return None
    return Finding(
        f"LoRA trains on one rank with the whole model, and model engine {config.model.engine} spreads it",
        "model.lora.rank",
        "set model.engine=local and placement.trainer_ranks=1, or model.lora.rank=0",
    )


ENGINE: tuple[Rule, ...] = (
    Rule("the model engine spreads over the trainer's ranks", engine_spreads_over_ranks),
    Rule("an adapter is trained where the whole model is", adapter_is_on_one_rank),
)
