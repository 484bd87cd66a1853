"""What lies in device memory when, for each way of sharing devices: the phases of a step, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rlctl.schema import Config
from rlctl.schema.adapters import adapter_alone

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
    "reference_weights",
    "critic",
    "critic_gradients",
    "critic_activations",
    "reward_weights",
    "sent_before",
    "adapter_sums",
]
Devices = Literal["shared", "trainer", "rollout", "reward"]


@dataclass(frozen=True)
class Phase:
    """A stretch of a step in which the same things lie in device memory.

    Attributes:
        name: as shown to users.
        devices: which devices it speaks of: shared ones, the trainer's own, the replicas' own, the reward model's own.
        holds: what lies there. "trainer_weights" includes the float32 masters; "optimizer" the moments, which a fresh
            run has from its first step on; "engine_work" what a prefill or a decode tick needs for a moment; "critic"
            its weights and moments; "sent_before" what a device keeps of what it sent, so that only changes are sent;
            "adapter_sums" weights with an adapter in them, beside a base that is kept.
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
    phases = (*_with_models_beside(_BY_LAYOUT[config.placement.layout], config), *lending)
    if adapter_alone(config):  # replicas keep the base
        hybrid = config.placement.layout == "hybrid"
        phases = _with_base_and_sums(phases, config) if hybrid else tuple(map(_with_weights, phases))
    if config.placement.layout == "hybrid" and config.sync.delta:
        phases = tuple(phase if phase.name == "load" else _with_weights(phase, "sent_before") for phase in phases)
    staying, host = _never_offloaded(config), config.cluster.device == "cpu"
    return tuple(_with_staying(phase, staying, host=host) for phase in phases)


def has_reference(config: Config) -> bool:
    """Whether a reference model lies beside the actor: with an adapter it may be the model that this sits on."""
    return config.algorithm.kl.place != "none" and not (
        config.model.lora.rank and config.algorithm.kl.reference is None
    )


def _beside(config: Config) -> tuple[Part, ...]:
    """Return what lies beside the trainer's weights while it computes."""
    reference: tuple[Part, ...] = ("reference_weights",) if has_reference(config) else ()
    return (*reference, "critic") if config.algorithm.critic.model is not None else reference


def _reward_weights(config: Config) -> tuple[Part, ...]:
    """Return the reward model's weights where it shares the trainer's devices."""
    shares = config.reward_model.path is not None and not config.placement.reward_devices
    return ("reward_weights",) if shares else ()


def _with_models_beside(phases: tuple[Phase, ...], config: Config) -> tuple[Phase, ...]:
    """Return the phases with the models beside the actor in them, and the phases in which these work.

    A reward model that shares devices comes from host memory to score and goes back. Models with devices of their own
    stay there.
    """
    beside, reward = _beside(config), _reward_weights(config)
    held: tuple[Part, ...] = ("trainer_weights", "optimizer", *beside)
    found: list[Phase] = []
    for phase in phases:
        if phase.name == "forward backward":
            if reward:
                found.append(Phase("score", phase.devices, (*held, *reward)))
            if config.algorithm.critic.model is not None:
                work: tuple[Part, ...] = ("critic_gradients", "critic_activations")
                found.append(Phase("critic update", phase.devices, (*held, *work)))
        computes = phase.name in ("forward backward", "optimizer step") or phase.devices == "trainer"
        found.append(replace(phase, holds=(*phase.holds, *beside)) if computes else phase)
    if config.reward_model.path is not None and not reward:
        found.append(Phase("score", "reward", ("reward_weights",)))
    return tuple(found)


def _with_base_and_sums(phases: tuple[Phase, ...], config: Config) -> tuple[Phase, ...]:
    """Return the phases of devices that keep a base beside what they generate with: in host memory where the trainer's
    weights go there."""
    if config.cluster.device != "cpu" and config.trainer.offload.params:
        return phases
    generating = (_with_weights(p, "adapter_sums") if "engine_weights" in p.holds else p for p in phases)
    return tuple(phase if phase.name == "load" else _with_weights(phase) for phase in generating)


def _with_weights(phase: Phase, *more: Part) -> Phase:
    """Return a phase in which replicas on these devices keep their weights, and ``more`` is kept."""
    if phase.devices != "shared":
        return phase
    weights: tuple[Part, ...] = () if "engine_weights" in phase.holds else ("engine_weights",)
    return replace(phase, holds=(*phase.holds, *weights, *more))


def _never_offloaded(config: Config) -> tuple[Part, ...]:
    """Return what stays on shared devices while responses are made: in host memory all that is ever offloaded."""
    if config.cluster.device == "cpu":
        return ("trainer_weights", "optimizer", *_beside(config), *_reward_weights(config))
    offload = config.trainer.offload
    named: tuple[tuple[Part, bool | None], ...] = (
        ("trainer_weights", offload.params),
        ("optimizer", offload.optimizer),
    )
    return tuple(part for part, leaves in named if leaves is False)


def _with_staying(phase: Phase, staying: tuple[Part, ...], *, host: bool) -> Phase:
    """Return ``phase`` with what never leaves. In host memory a KV cache takes room when it is written to, not when it
    wakes."""
    if phase.devices != "shared":
        return phase
    if phase.name == "load":  # moments come with the first step
        return replace(phase, holds=(*phase.holds, *(p for p in staying if p not in (*phase.holds, "optimizer"))))
    rest = [part for part in phase.holds if part not in staying]
    if host and phase.name == "wake KV cache":
        rest.remove("kv_cache")
    return replace(phase, holds=(*staying, *rest))
