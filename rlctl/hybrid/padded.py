"""Switches to a layout whose parts are padded: shards lie in zeros, which nobody sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rlctl.hybrid.reshard.report import Switched
from rlctl.hybrid.reshard.resharder import Resharder
from rlctl.hybrid.zeros import is_padded, room_of
from rlctl.keys.dtypes import torch_dtype
from rlctl.sync.plan import Plan


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
