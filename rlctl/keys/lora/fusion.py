"""Adapters of fused layers: one A and B for q, k and v (or gate and up), or one pair for each.

A fused layer's output is its projections' outputs put together, so a fused B is their B's put together and a shared A
serves all of them exactly. Projections with different A's fit one fused pair only at the sum of their ranks: A stacked,
B block-diagonal. The scaling must then be kept by hand: ``alpha' = alpha * R/r``, or ``alpha * sqrt(R/r)`` with rsLoRA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """A (r, in) and B (out, r) of one linear layer."""

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]


@dataclass(frozen=True)
class Fused:
    """One pair for several projections; ``blocks`` are the ranks of its diagonal blocks, empty for one shared A."""

    pair: Pair
    blocks: tuple[int, ...] = ()


def interleave_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Put q (H*d, *), k and v (G*d, *) into Megatron's order: for every group its query heads, its key, its value.

    Raises UsageError when the rows do not divide into ``groups``.
    """
    import torch

    if q.shape[0] % groups or k.shape[0] % groups or k.shape != v.shape:
        raise UsageError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not divide into {groups} groups"
        )
    parts = [t.reshape(groups, t.shape[0] // groups, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def deinterleave_qkv(fused: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Undo :func:`interleave_qkv` for ``heads`` query heads in ``groups`` groups. Raises UsageError on other sizes."""
    units = heads // groups + 2
    if heads % groups or fused.shape[0] % (groups * units):
        raise UsageError(f"{fused.shape[0]} rows are no fused q, k, v of {heads} heads in {groups} groups")
    size = fused.shape[0] // (groups * units)
    by_group = fused.reshape(groups, units * size, *fused.shape[1:])
    q, k, v = by_group.split([(units - 2) * size, size, size], dim=1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def block_diagonal(pairs: Sequence[Pair]) -> tuple[Tensor, list[Tensor]]:
    """Return A (sum of r, in) and one B (out_i, sum of r) for each pair, zero outside its own columns.

    The columns of projection i start behind those of the projections before it; ``sum of B_i @ A_i`` is unchanged.
    """
    import torch

    total = sum(pair.rank for pair in pairs)
    outs, start = [], 0
    for pair in pairs:
        wide = pair.b.new_zeros((pair.b.shape[0], total))
        wide[:, start : start + pair.rank] = pair.b
        outs.append(wide)
        start += pair.rank
    return torch.cat([pair.a for pair in pairs]), outs


def join(pairs: Sequence[Pair], *, blocks: bool = True) -> tuple[Tensor, list[Tensor], tuple[int, ...]]:
    """Return one A for all ``pairs``, their B's for it, and the block ranks (empty when the A's were equal already).

    Raises UsageError when the A's differ and ``blocks`` is False.
    """
    import torch

    first = pairs[0].a
    if all(pair.a.shape == first.shape and torch.equal(pair.a, first) for pair in pairs[1:]):
        return first, [pair.b for pair in pairs], ()
    if not blocks:
        raise UsageError(
            f"the {len(pairs)} projections have different A's: no fused adapter of rank {pairs[0].rank} holds them",
            fix=f"allow the block form of rank {sum(p.rank for p in pairs)}, or keep one adapter for each projection",
        )
    a, bs = block_diagonal(pairs)
    return a, bs, tuple(pair.rank for pair in pairs)


def unjoin(a: Tensor, bs: Sequence[Tensor], ranks: Sequence[int]) -> list[Pair] | None:
    """Undo the block form: one pair of rank ``ranks[i]`` for each B, or None when a B leaves its own columns."""
    if sum(ranks) != a.shape[0] or len(ranks) != len(bs):
        return None
    pairs, start = [], 0
    for b, rank in zip(bs, ranks, strict=True):
        end = start + rank
        if b[:, :start].any() or b[:, end:].any():
            return None
        pairs.append(Pair(a[start:end].contiguous(), b[:, start:end].contiguous()))
        start = end
    return pairs


def fuse_qkv(q: Pair, k: Pair, v: Pair, groups: int, *, blocks: bool = True) -> Fused:
    """Return one adapter for Megatron's ``linear_qkv``. Raises UsageError for different A's without ``blocks``."""
    a, (b_q, b_k, b_v), ranks = join([q, k, v], blocks=blocks)
    return Fused(Pair(a, interleave_qkv(b_q, b_k, b_v, groups)), ranks)


def split_qkv(fused: Fused, heads: int, groups: int) -> list[Pair]:
    """Return the adapters of q, k and v: exact, with A copied, or taken out of its blocks where they are given."""
    return _split(fused, list(deinterleave_qkv(fused.pair.b, heads, groups)))


def fuse_gate_up(gate: Pair, up: Pair, *, blocks: bool = True) -> Fused:
    """Return one adapter for a fused ``[gate; up]`` layer. Raises UsageError as :func:`fuse_qkv` does."""
    import torch

    a, bs, ranks = join([gate, up], blocks=blocks)
    return Fused(Pair(a, torch.cat(bs)), ranks)


def split_gate_up(fused: Fused) -> list[Pair]:
    """Return the adapters of gate and up. Raises UsageError for an odd number of rows."""
    if fused.pair.b.shape[0] % 2:
        raise UsageError(f"{fused.pair.b.shape[0]} rows of B do not halve into gate and up")
    return _split(fused, list(fused.pair.b.chunk(2)))


def stack_experts(pairs: Sequence[Pair]) -> Pair:
    """Return PEFT's stacked form of one pair an expert: A (E*r, in) expert by expert, B (out, E*r) rank by rank."""
    import torch

    ranks = {pair.rank for pair in pairs}
    if len(ranks) != 1:
        raise UsageError(
            f"experts of different rank {sorted(ranks)} cannot be stacked", fix="pad them to one rank first"
        )
    b = torch.stack([pair.b for pair in pairs], dim=-1)  # (out, r, E)
    return Pair(torch.cat([pair.a for pair in pairs]), b.flatten(1))


def unstack_experts(pair: Pair, experts: int) -> list[Pair]:
    """Undo :func:`stack_experts`. Raises UsageError when the rank does not divide into ``experts``."""
    from rlctl.keys.lora.arithmetic import expert_pair

    if pair.rank % experts or pair.b.shape[1] != pair.rank:
        raise UsageError(f"A of {pair.rank} rows and B of {pair.b.shape[1]} columns hold no {experts} experts")
    pairs = (expert_pair(pair.a, pair.b, e, experts) for e in range(experts))
    return [Pair(a.contiguous(), b.contiguous()) for a, b in pairs]


def pad_rank(pair: Pair, rank: int) -> Pair:
    """Return the same adapter at a higher rank, the new rows of A and columns of B being zero."""
    import torch

    extra = rank - pair.rank
    assert extra >= 0, "a rank can only be padded up"
    a = torch.cat([pair.a, pair.a.new_zeros((extra, pair.a.shape[1]))])
    return Pair(a, torch.cat([pair.b, pair.b.new_zeros((pair.b.shape[0], extra))], dim=1))


def alpha_for_rank(alpha: float, rank: int, new_rank: int, *, rslora: bool) -> float:
    """Return the alpha that keeps the scaling when the rank changes: times R/r, or its root with rsLoRA."""
    return alpha * (math.sqrt(new_rank / rank) if rslora else new_rank / rank)


def _split(fused: Fused, bs: list[Tensor]) -> list[Pair]:
    if fused.blocks:
        pairs = unjoin(fused.pair.a, bs, fused.blocks)
        if pairs is None:
            raise UsageError(
                f"the fused adapter's blocks {fused.blocks} are no longer intact",
                fix="split it without blocks: every projection then keeps the full A",
            )
        return pairs
    return [Pair(fused.pair.a, b.contiguous()) for b in bs]
