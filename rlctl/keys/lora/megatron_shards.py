"""Megatron's adapter tensors over tensor-parallel ranks, as Megatron-Bridge cuts them.

B is always cut by outputs. A is cut by rank under a column-parallel base layer and by inputs under a row-parallel one.
A fused gate-and-up B gives each rank its share of gate on top of its share of up; a fused q, k, v B its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlctl.errors import UsageError
from rlctl.keys.lora.megatron_names import Linear, MegatronKey

if TYPE_CHECKING:
    from torch import Tensor


def shard(linear: Linear, key: MegatronKey, tensor: Tensor, tp: int) -> list[Tensor]:
    """Return the tensor of every rank. Raises UsageError when a dimension does not divide by ``tp``."""
    import torch

    if linear.parallel == "none" or tp == 1:
        return [tensor] * tp
    dim = _dim(linear, key)
    if _in_halves(linear, key):
        gate, up = (_cut(half, dim, tp, key) for half in tensor.chunk(2, dim=dim))
        return [torch.cat(pair, dim=dim) for pair in zip(gate, up, strict=True)]
    return _cut(tensor, dim, tp, key)


def gather(linear: Linear, key: MegatronKey, shards: Sequence[Tensor]) -> Tensor:
    """Undo :func:`shard`. Raises UsageError for replicas that differ."""
    import torch

    if linear.parallel == "none" or len(shards) == 1:
        if any(not torch.equal(shards[0], other) for other in shards[1:]):
            raise UsageError(f"replicas of {key.linear} differ between ranks")
        return shards[0]
    dim = _dim(linear, key)
    if _in_halves(linear, key):
        halves = [one.chunk(2, dim=dim) for one in shards]
        return torch.cat([*(h[0] for h in halves), *(h[1] for h in halves)], dim=dim)
    return torch.cat(list(shards), dim=dim)


def _dim(linear: Linear, key: MegatronKey) -> int:
    """The dimension that is cut, from the back, as stacked experts have one more in front."""
    return -1 if key.side == "in" and linear.parallel == "row" else -2


def _in_halves(linear: Linear, key: MegatronKey) -> bool:
    return key.side == "out" and linear.gated and not key.key


def _cut(tensor: Tensor, dim: int, tp: int, key: MegatronKey) -> list[Tensor]:
    if tensor.shape[dim] % tp:
        what = "rank" if key.side == "in" and dim == -2 else "size"
        raise UsageError(
            f"{what} {tensor.shape[dim]} of the adapter on {key.linear} does not divide over {tp} ranks",
            fix="use a rank that is a multiple of the tensor-parallel size" if what == "rank" else None,
        )
    return [part.contiguous() for part in tensor.chunk(tp, dim=dim)]
