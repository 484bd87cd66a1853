"""A rank's parts of base and adapter, put together to what it generates with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rlctl.hybrid.lora.parts import Sum
from rlctl.keys.lora.arithmetic import LowRank, merge_into
from rlctl.sync.boxes import slices


def folded(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], sums: Iterable[Sum], device: torch.device
) -> dict[str, Tensor]:
    """Return generation shards with the adapter in them: float32 sums, cast once.

    What an adapter is added to is written apart from the base, which never changes: nothing is ever taken off again,
    and an adapter cannot count twice. Other shards are the base's own.

    Args:
        base: generation shards without an adapter, on any device.
        adapter: this rank's parts of A and B.
        sums: what is added where.
        device: of the result.
    """
    made: dict[str, Tensor] = {}
    for one in sums:
        if one.shard not in made:
            made[one.shard] = base[one.shard].to(device, copy=True)
        part = made[one.shard][slices(one.box)]
        a, b = adapter[one.a].to(device, torch.float32), adapter[one.b].to(device, torch.float32)
        left, right = (a.T, b.T) if one.transposed else (b, a)
        merge_into(part, part, [LowRank(left, right, one.scale)])
    return {name: made[name] if name in made else shard.to(device) for name, shard in base.items()}
