"""What lies in device memory when, for each way of sharing devices: the phases of a step, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rlctl.schema import Config

Part = Literal[
    "trainer_weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "engine_weights",
    "engine_work",
    "kv_cache",
    "buckets",
]
Devices = Literal["shared", "trainer", "rollout"]


@dataclass(frozen=True)
class Phase:
    """A stretch of a step in which the same things lie in device memory.

    Attributes:
        name: as shown to users.
        devices: which devices it speaks of: shared ones, the trainer's own, the replicas' own.
        holds: what lies there. "trainer_weights" includes the float32 masters; "optimizer" the moments, which a fresh
            run has from its first step on; "engine_work" what a prefill or a decode tick needs for a moment.
    """

    name: str
    devices: Devices
    holds: tuple[Part, ...]


COLOCATED: tuple[Phase, ...] = (
    Phase("load", "shared", ("trainer_weights", "engine_weights")),
    Phase("rollout", "shared", ("engine_weights", "kv_cache", "engine_work")),
    Phase("sample end", "shared", ("engine_weights", "kv_cache")),
    Phase("sleep", "shared", ()),
    Phase("forward backward", "shared", ("trainer_weights", "gradients", "optimizer", "activations", "logits")),
    Phase("optimizer step", "shared", ("trainer_weights", "gradients", "optimizer")),
    Phase("sync: wake weights", "shared", ("trainer_weights", "optimizer", "engine_weights")),
    Phase("sync: load", "shared", ("trainer_weights", "optimizer", "engine_weights", "buckets")),
    Phase("sync: offload trainer", "shared", ("engine_weights",)),
    Phase("wake KV cache", "shared", ("engine_weights", "kv_cache")),
)

# In place: the engine's shards are built from the trainer's, so nothing is held twice except what is on its way.
HYBRID: tuple[Phase, ...] = (
    Phase("load", "shared", ("trainer_weights",)),
    Phase("rollout", "shared", ("trainer_weights", "optimizer", "engine_weights", "kv_cache", "engine_work")),
    Phase("sample end", "shared", ("trainer_weights", "optimizer", "engine_weights", "kv_cache")),
    Phase("sleep", "shared", ("trainer_weights", "optimizer")),
    Phase("forward backward", "shared", ("trainer_weights", "gradients", "optimizer", "activations", "logits")),
    Phase("optimizer step", "shared", ("trainer_weights", "gradients", "optimizer")),
    Phase("sync: reshard", "shared", ("trainer_weights", "optimizer", "engine_weights", "buckets")),
    Phase("wake KV cache", "shared", ("trainer_weights", "optimizer", "engine_weights", "kv_cache")),
)

SEPARATE: tuple[Phase, ...] = (
    Phase("load", "trainer", ("trainer_weights",)),
    Phase("load", "rollout", ("engine_weights",)),
    Phase("rollout", "rollout", ("engine_weights", "kv_cache", "engine_work")),
    Phase("forward backward", "trainer", ("trainer_weights", "gradients", "optimizer", "activations", "logits")),
    Phase("optimizer step", "trainer", ("trainer_weights", "gradients", "optimizer")),
    Phase("sync: release KV cache", "rollout", ("engine_weights",)),
    Phase("sync: transfer", "trainer", ("trainer_weights", "optimizer", "buckets")),
    Phase("sync: transfer", "rollout", ("engine_weights", "buckets")),
    Phase("wake KV cache", "rollout", ("engine_weights", "kv_cache")),
)

# Replicas on the trainer's devices that generate while the trainer waits.
LENDING: tuple[Phase, ...] = (
    Phase("lend: wake weights", "trainer", ("trainer_weights", "optimizer", "engine_weights", "buckets")),
    Phase("lend: rollout", "trainer", ("engine_weights", "kv_cache", "engine_work")),
    Phase("reclaim", "trainer", ("trainer_weights", "optimizer")),
)

_BY_LAYOUT: dict[str, tuple[Phase, ...]] = {"colocated": COLOCATED, "hybrid": HYBRID, "separate": SEPARATE}


def phases_of_layout(config: Config) -> tuple[Phase, ...]:
    """Return the phases of a step, in order, for the layout of ``config`` and the replicas that it lends."""
    lending = LENDING if config.placement.hybrid_replicas else ()
    phases = (*_BY_LAYOUT[config.placement.layout], *lending)
    if adapters_alone(config):
        phases = tuple(map(_with_weights, phases))
    return tuple(map(_in_host_memory, phases)) if config.cluster.device == "cpu" else phases


def adapters_alone(config: Config) -> bool:
    """Whether replicas keep the base and are sent an adapter alone."""
    return config.model.lora.rank > 0 and config.model.lora.sync == "adapter"


def _with_weights(phase: Phase) -> Phase:
    """Return a phase in which replicas on these devices keep their weights."""
    if phase.devices != "shared" or "engine_weights" in phase.holds:
        return phase
    return replace(phase, holds=(*phase.holds, "engine_weights"))


def _in_host_memory(phase: Phase) -> Phase:
    """Return ``phase`` where devices are the host itself: an offloaded trainer stays where it was, and a KV cache takes
    memory when it is written to, not when it wakes."""
    if phase.devices != "shared" or phase.name == "load":
        return phase
    stays: tuple[Part, ...] = ("trainer_weights", "optimizer")
    rest = [part for part in phase.holds if part not in stays]
    if phase.name == "wake KV cache":
        rest.remove("kv_cache")
    return replace(phase, holds=(*stays, *rest))
