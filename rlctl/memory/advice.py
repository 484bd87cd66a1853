"""What to change when a run does not fit, by the bytes that it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlctl.errors import UsageError
from rlctl.memory.workload import Workload

LORA_RANK = 16


@dataclass(frozen=True)
class Advice:
    """One change.

    Attributes:
        change: as key=value words.
        why: what it does.
        saved_bytes: how much lower the peak is with it alone.
    """

    change: str
    why: str
    saved_bytes: int


def advise(work: Workload, peak: Callable[[Workload], int]) -> list[Advice]:
    """Return the changes that lower the peak, most bytes first.

    Args:
        work: a run.
        peak: bytes of a run's fullest moment; may raise UsageError for one that cannot be.
    """
    before = peak(work)
    found = []
    for values, why in _changes(work):
        config = work.config
        for key, value in values.items():
            config = changed(config, key, value)
        try:
            saved = before - peak(replace(work, config=config))
        except UsageError:
            continue
        if saved > 0:
            words = (
                f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()
            )
            found.append(Advice(" ".join(words), why, saved))
    return sorted(found, key=lambda advice: -advice.saved_bytes)


def changed(config: Any, key: str, value: object) -> Any:
    """Return the dataclass ``config`` with ``value`` under the dotted ``key``."""
    head, _, rest = key.partition(".")
    return replace(config, **{head: changed(getattr(config, head), rest, value) if rest else value})


def _changes(work: Workload) -> Iterator[tuple[dict[str, object], str]]:
    config = work.config
    place, trainer, rollout = config.placement, config.trainer, config.rollout
    if trainer.micro_batch_tokens > work.sequence:
        fewer = max(trainer.micro_batch_tokens // 2, work.sequence)
        yield {"trainer.micro_batch_tokens": fewer}, "fewer tokens in one pass; as many passes more"
    if not config.model.gradient_checkpointing:
        why = "activations of a layer are computed again; a third more compute"
        yield {"model.gradient_checkpointing": True}, why
    if config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}, "activations, rollout weights and KV cache in half the bytes"
    if not config.model.lora.rank:
        yield {"model.lora.rank": LORA_RANK}, "gradients and moments of an adapter alone"
    if place.replicas > 1:
        fewer_replicas: dict[str, object] = {
            "placement.replica_tp": place.replica_tp * 2,
            "placement.replicas": place.replicas // 2,
        }
        yield fewer_replicas, "each rollout rank keeps half the weights and heads"
    yield {"placement.trainer_tp": place.trainer_tp * 2}, "each trainer rank computes half the heads and features"
    nodes, each = config.cluster.nodes, config.cluster.devices_per_node
    more: dict[str, object] = {"placement.trainer_ranks": place.trainer_ranks * 2}
    more |= {"cluster.nodes": nodes * 2} if nodes > 1 or each >= 8 else {"cluster.devices_per_node": each * 2}
    yield more, "twice the devices: each trainer rank keeps half the shards"
    if rollout.max_slots > 1:
        yield {"rollout.max_slots": rollout.max_slots // 2}, "half as many responses at once"
    if rollout.max_new_tokens > 1:
        yield {"rollout.max_new_tokens": rollout.max_new_tokens // 2}, "shorter responses"
    yield {"sync.bucket_size": config.sync.bucket_size // 2}, "smaller transfer buckets"
