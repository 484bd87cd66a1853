"""Delivery in slices: each rank of a replica gets what its own shards lack, from the trainer ranks that hold it.

All members are told the same two layouts and work out the same transfer plan, so nobody has to tell another what it
will send. A slice travels as a tensor of its own, named after the weight and its place in it,
``model.norm.weight[0:128]``: what is counted, hashed and compared on arrival is that slice of that weight, and one that
comes twice, is missing, or is cut otherwise than planned is refused by that name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod

import msgspec
import torch

from rlctl.errors import UsageError
from rlctl.keys.dtypes import dtype_code
from rlctl.keys.model_spec import ModelSpec
from rlctl.sync.boxes import Box, sizes, slices, volume
from rlctl.sync.errors import MismatchError
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.plan import Plan
from rlctl.sync.weights import Weight, model_weights


@dataclass(frozen=True)
class Layouts:
    """Which rank holds which part of which weight, on both sides.

    Attributes:
        weights: of the model.
        train: of the trainer's ranks; each keeps its parts under the weights' own names.
        rollout: of the ranks of one replica; all replicas are alike.
        devices_per_node: of the trainer's and then a replica's ranks, for a choice between several holders; 0: one
            node.
    """

    weights: tuple[Weight, ...]
    train: ParallelLayout
    rollout: ParallelLayout
    devices_per_node: int = 0

    def __post_init__(self) -> None:
        if self.rollout.replicas != 1:
            raise UsageError(f"a replica's layout has {self.rollout.replicas} replicas", fix="replicas=1")
        if self.train.fused:
            raise UsageError("a trainer's ranks keep weights under their own names", fix="fused=False")

    @classmethod
    def of_model(
        cls, spec: ModelSpec, train: ParallelLayout, rollout: ParallelLayout, *, dtype: str | None = None
    ) -> Layouts:
        """Return those of a model; ``dtype``: safetensors code of what travels, default the configuration's own."""
        return cls(tuple(model_weights(spec, dtype)), train, rollout)

    @cached_property
    def fingerprint(self) -> str:
        """What members compare: it is equal when the layouts are."""
        return hashlib.sha256(msgspec.msgpack.encode(asdict(self))).hexdigest()

    @cached_property
    def plan(self) -> Plan:
        """The transfer plan for one replica. Its others get the same slices from the same ranks, at the same time."""
        train, rollout = self.train.ranks, self.rollout.ranks
        cluster = Cluster(self.devices_per_node or train + rollout)
        return Plan(self.weights, self.train, self.rollout, Placement.separate(cluster, train, rollout))

    @cached_property
    def owners(self) -> dict[str, int]:
        """Slice -> the trainer rank that brings it where each is brought once, for all who want it."""
        found: dict[str, int] = {}
        for t in self.plan.transfers():
            found.setdefault(slice_name(t.tensor, t.box), t.src)
        return found

    def wanted(self, part: int) -> set[str]:
        """Return the slices that rank ``part`` of a replica takes."""
        return {slice_name(t.tensor, t.box) for t in self.plan.transfers(dst=part)}

    def sources(self, rank: int, shards: Mapping[str, torch.Tensor]) -> dict[int, list[tuple[str, torch.Tensor]]]:
        """Return what trainer rank ``rank`` sends out of its ``shards``: rank of a replica -> (slice, where it lies).

        Raises MismatchError when a shard is not there or not of its shape.
        """
        held = {
            weight.name: (sizes(share.box), weight.dtype)
            for weight in self.weights
            for share in self.train.shares(weight)
            if rank in share.ranks
        }
        found: dict[int, list[tuple[str, torch.Tensor]]] = {part: [] for part in range(self.rollout.ranks)}
        for t in self.plan.transfers(src=rank):
            shard = _shard(f"trainer rank {rank}", t.src_tensor, shards)
            here = (tuple(shard.shape), dtype_code(shard.dtype))
            if here != held[t.tensor]:
                raise MismatchError(
                    f"trainer rank {rank} holds {t.src_tensor} as {here}, and by its layout {held[t.tensor]}"
                )
            found[t.dst].append((slice_name(t.tensor, t.box), shard[slices(t.src_box)]))
        return found

    def targets(self, part: int, shards: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return where rank ``part`` of a replica takes what: slice -> its place in one of the ``shards``. A shard
        that no slice belongs to is there under its own name.

        Raises MismatchError when a shard is not there, or not as large as what belongs into it.
        """
        who = f"rank {part} of a replica"
        found: dict[str, torch.Tensor] = {}
        filled: dict[str, list[Box]] = {}
        for t in self.plan.transfers(dst=part):
            name, shard = slice_name(t.tensor, t.box), _shard(who, t.dst_tensor, shards)
            if len(t.dst_box) != shard.dim() or any(b > n for (_, b), n in zip(t.dst_box, shard.shape, strict=True)):
                raise MismatchError(
                    f"{who} holds {t.dst_tensor} as {tuple(shard.shape)}, and slice {name} belongs at "
                    f"{_place(t.dst_box)} of it"
                )
            found[name] = shard[slices(t.dst_box)].view(sizes(t.box))
            filled.setdefault(t.dst_tensor, []).append(t.dst_box)
        padded = {weight.name for weight in self.weights if weight.split.kind == "vocab"}
        for name, shard in shards.items():
            boxes = filled.get(name, [])
            due = shard.numel()
            if name in padded:  # rows behind the last word, which may be all that a rank has
                due = prod(shard.shape[1:]) * max((box[0][1] for box in boxes), default=0)
            if due and not boxes:
                found[name] = shard
            elif sum(volume(box) for box in boxes) != due:
                raise MismatchError(f"the slices of {name} do not fill the {tuple(shard.shape)} that {who} holds")
        return found


def slice_name(weight: str, box: Box) -> str:
    """Return what a slice is called on its way."""
    return weight + _place(box)


def _place(box: Box) -> str:
    return "[" + ",".join(f"{low}:{high}" for low, high in box) + "]"


def _shard(who: str, name: str, shards: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in shards:
        raise MismatchError(f"{who} has no {name}, and by its layout it holds a part of it")
    return shards[name].detach()
