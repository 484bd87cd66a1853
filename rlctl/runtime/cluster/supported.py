"""Which runs are made of processes of their own, and what such a run cannot do."""

from __future__ import annotations

from rlctl.errors import UnavailableError
from rlctl.rollout.registry import ROLLOUT_ENGINES
from rlctl.schema import Config
from rlctl.schema.adapters import adapter_alone

HOSTED = ("local", "fsdp2")
"""Model engines that a trainer rank hosts."""


def needs_processes(config: Config) -> bool:
    """Whether replicas are processes of their own: they have other devices than the trainer, there are several, the
    backend is for such, or the engine is."""
    place = config.placement
    return (
        place.layout == "separate"
        or place.replicas != 1
        or place.replica_tp > 1
        or config.sync.backend != "naive"
        or config.rollout.engine.partition(":")[0] not in ROLLOUT_ENGINES.names()
    )


def require_supported(config: Config) -> None:
    """Raise UnavailableError when replicas in processes of their own cannot serve a run."""
    if config.sync.backend == "naive":
        raise UnavailableError(
            f"checkpoint engine {config.sync.backend} hands weights on within one process, and replicas have their own",
            where="sync.backend",
            fix="set sync.backend=ipc",
        )
    _require_adapters(config)
    if config.model.engine not in HOSTED:
        raise UnavailableError(
            f"a trainer rank hosts the model engines {', '.join(HOSTED)}, and this is {config.model.engine}",
            where="model.engine",
            fix="set model.engine=fsdp2",
        )


def _require_adapters(config: Config) -> None:
    """Raise UnavailableError when replicas cannot be sent adapters alone, and they are to be."""
    lora = config.model.lora
    if not adapter_alone(config):
        return
    if config.sync.commit == "staged":
        raise UnavailableError(
            "an adapter that is sent alone is added to the live weights, and staged syncs keep them until the commit",
            where="sync.commit",
            fix="set sync.commit=inplace, or model.lora.sync=merged",
        )
    if lora.use_dora and config.rollout.engine.partition(":")[0] != "transformers":
        raise UnavailableError(
            f"the rollout engine {config.rollout.engine} takes no DoRA adapter",
            where="model.lora.use_dora",
            fix="set model.lora.sync=merged",
        )
