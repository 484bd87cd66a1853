"""The engine of the model that is trained: in this process, or in ranks of its own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Noted
from rlctl.model.base import ModelEngine
from rlctl.model.loading import LoadedModel
from rlctl.model.memory_settings import Memory
from rlctl.model.registry import MODEL_ENGINES
from rlctl.runtime.ranks.starting import start_ranks, usable_cores
from rlctl.schema import Config


def memory_of(config: Config) -> Memory:
    """Return how the trainer saves device memory."""
    offload = config.trainer.offload
    return Memory(
        activation_dtype=config.model.activation_dtype,
        gradient_checkpointing=config.model.gradient_checkpointing,
        offload_params=bool(offload.params),
        offload_optimizer=bool(offload.optimizer),
    )


def trained_model(
    config: Config,
    loaded: LoadedModel,
    events: EventLog,
    *,
    total_updates: int,
    passes: dict[str, Any],
    logs: Path | None,
    stack: ExitStack,
) -> ModelEngine:
    """Return the engine that ``model.engine`` names; closing ``stack`` ends its processes.

    Args:
        config: resolved.
        loaded: the model in float32.
        events: where a crowded machine is told.
        total_updates: optimizer steps of the whole run, for the schedule.
        passes: how rows go through a model in this process.
        logs: folder of the logs of the trainer's ranks.
    """
    memory = memory_of(config)
    if config.model.engine == "fsdp2":
        ranks, cores = config.placement.trainer_ranks, usable_cores()
        if config.cluster.device == "cpu" and ranks > cores:
            events.emit(Noted(message=f"{ranks} trainer ranks share {cores} CPU cores: they take turns"))
        return start_ranks(
            config,
            loaded.model.config,
            loaded.source,
            total_updates=total_updates,
            memory=memory,
            logs=logs,
            stack=stack,
        )
    lora = config.model.lora
    adapter: dict[str, Any] = {"lora": lora, "seed": config.run.seed, "base": loaded.source} if lora.rank else {}
    engine = MODEL_ENGINES.load("lora" if lora.rank else config.model.engine or "local", where="model.engine")
    return engine(
        loaded.model, config.trainer.optimizer, total_updates=total_updates, memory=memory, **passes, **adapter
    )
