"""Switches to a layout whose parts are padded: shards lie in zeros, which nobody sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from rlctl.hybrid.reshard.memory import Shape
from rlctl.hybrid.reshard.report import Switched
from rlctl.hybrid.reshard.resharder import Resharder
from rlctl.keys.dtypes import dtype_nbytes, torch_dtype
from rlctl.sync.boxes import Box
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.plan import Plan
from rlctl.sync.weights import Weight


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


class PaddedResharder(Resharder):
    """``Resharder`` to a padded layout: the shards are those with their zeros.

    Args: see ``Resharder``.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None, **options: Any) -> None:
        super().__init__(plan, group, **options)
        places, device = plan.placement.rollout, plan.placement.train[self._rank]
        self._shapes = room_of(plan, places.index(device)) if device in places else {}
        self._room: dict[str, torch.Tensor] = {}

    def to_rollout(
        self,
        held: Mapping[str, torch.Tensor],
        *,
        version: int | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> Switched:
        """See ``Resharder``."""
        assert into is None, "the shards lie in zeros of their own"
        fresh = 0
        if not self._room:
            device = next((tensor.device for tensor in held.values()), torch.device("cpu"))
            self._room = {
                name: torch.zeros(shape, dtype=torch_dtype(dtype), device=device)
                for name, (shape, dtype) in self._shapes.items()
            }
            fresh = sum(tensor.nbytes for tensor in self._room.values())
        switched = super().to_rollout(held, version=version, into=self._room)
        report = replace(switched.report, peak_extra_bytes=switched.report.peak_extra_bytes + fresh)
        return Switched(dict(self._room), report)

    @property
    def kept_nbytes(self) -> int:
        """See ``Resharder``: zeros are kept, too."""
        return 0 if self._base is None else self._base.nbytes + sum(tensor.nbytes for tensor in self._room.values())

    def to_training(self) -> None:
        """See ``Resharder``."""
        super().to_training()
        if not self._delta:
            self._room = {}


def make_resharder(plan: Plan, group: dist.ProcessGroup | None, **options: Any) -> Resharder:
    """Return what switches by ``plan``; see ``Resharder``."""
    return (PaddedResharder if is_padded(plan) else Resharder)(plan, group, **options)


def _part(plan: Plan, weight: Weight, rank: int) -> Box:
    """Return the part of a weight that a rollout rank has; an empty one when it has none."""
    shares = plan.rollout.shares(weight)
    own = next((share.box for share in shares if rank in share.ranks), None)
    return own if own is not None else tuple((0, n if dim else 0) for dim, n in enumerate(weight.shape))
