"""What the parts of a padded layout are padded with. Arithmetic only."""

from __future__ import annotations

from math import prod

from rlctl.keys.dtypes import dtype_nbytes
from rlctl.sync.boxes import Box
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.plan import Plan
from rlctl.sync.weights import Weight

Shape = tuple[tuple[int, ...], str]
"""Sizes, and a safetensors dtype."""


def is_padded(plan: Plan) -> bool:
    """Whether the rollout's parts are padded to one size."""
    return isinstance(plan.rollout, ParallelLayout) and plan.rollout.padded


def room_of(plan: Plan, rank: int) -> dict[str, Shape]:
    """Return name -> (shape, dtype) of the shards of a rollout rank with their zeros: all ranks have those of the
    first, but for rows of the vocabulary, of which each has its own."""
    found: dict[str, Shape] = {}
    for weight in plan.weights:
        box = _part(plan, weight, rank if weight.split.kind == "vocab" else 0)
        name, here = plan.rollout.local(weight, box, box)
        before, dtype = found.get(name, ((0,) * len(here), weight.dtype))
        found[name] = tuple(max(n, high) for n, (_, high) in zip(before, here, strict=True)), dtype
    return found


def zeros_nbytes(plan: Plan) -> list[int]:
    """Return the bytes of zeros on each rollout rank."""
    if not is_padded(plan):
        return [0] * plan.rollout.ranks
    held = [
        sum(dtype_nbytes(d, prod(s)) for s, d in room_of(plan, rank).values()) for rank in range(plan.rollout.ranks)
    ]
    return [most - int(nbytes) for most, nbytes in zip(held, plan.wanted, strict=True)]


def _part(plan: Plan, weight: Weight, rank: int) -> Box:
    """Return the part of a weight that a rollout rank has; an empty one when it has none."""
    shares = plan.rollout.shares(weight)
    own = next((share.box for share in shares if rank in share.ranks), None)
    return own if own is not None else tuple((0, n if dim else 0) for dim, n in enumerate(weight.shape))
