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


def adapter_is_whole_in_a_layer(config: Config) -> Finding | None:
    if not config.model.lora.rank or config.model.engine in (None, "local"):
        return None
    if config.model.engine != "fsdp2":
        return Finding(
            f"LoRA trains on the model engines local and fsdp2, and this is {config.model.engine}",
            "model.lora.rank",
            "set model.engine=fsdp2, or model.lora.rank=0",
        )
    if config.placement.trainer_tp > 1:
        return Finding(
            "LoRA trains on ranks that each hold whole layers' shards, and tensor parallelism cuts within layers",
            "placement.trainer_tp",
            "set placement.trainer_tp=1, or model.lora.rank=0",
        )
    return None


ENGINE: tuple[Rule, ...] = (
    Rule("the model engine spreads over the trainer's ranks", engine_spreads_over_ranks),
    Rule("an adapter is trained where layers are whole", adapter_is_whole_in_a_layer),
)
