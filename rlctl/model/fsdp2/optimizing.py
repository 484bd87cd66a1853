"""AdamW on this rank's parts of the parameters; the gradient norm is that of all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from rlctl.model.fsdp2.shards import Shards, local_of
from rlctl.model.optimizing import Optimizing
from rlctl.schema.training import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedOptimizing(Optimizing):
    """AdamW that steps parts: what it keeps is cut as the parameters are.

    Args:
        module: the sharded model.
        shards: its parameters.
        settings, total_updates: see ``Optimizing``.
    """

    def __init__(self, module: torch.nn.Module, shards: Shards, settings: OptimizerConfig, total_updates: int) -> None:
        self._shards = shards
        self._parts = {name: torch.nn.Parameter(shards.local(name)) for name in shards.trained()}
        super().__init__(module, settings, total_updates)

    @property
    def updates(self) -> int:
        """Optimizer steps taken so far."""
        return self._updates

    def clear(self) -> None:
        super().clear()
        for parameter in self._shards.parameters.values():
            parameter.grad = None

    def moments(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (moment, parameter, this rank's part) of all that AdamW keeps; nothing before the first step."""
        for moment in MOMENTS:
            for name, part in self._parts.items():
                if part in self._optimizer.state:
                    yield moment, name, self._optimizer.state[part][moment]

    def load_moments(self, updates: int, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Go on after ``updates`` steps with these parts: moment -> parameter -> tensor."""
        self._updates = updates
        self._optimizer.state.clear()
        for name, part in self._parts.items():
            if name in moments["exp_avg"]:
                kept: dict[str, Any] = {moment: moments[moment][name].clone() for moment in MOMENTS}
                self._optimizer.state[part] = {"step": torch.tensor(float(updates), device=part.device), **kept}

    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        return self._parts

    def clip(self, limit: float) -> float:
        squares = torch.zeros(1, dtype=torch.float64)
        for name, part in self._parts.items():
            # FSDP2 may move a part to other memory at its first pass.
            part.data = self._shards.local(name)
            gradient = self._shards.parameters[name].grad
            part.grad = None if gradient is None else local_of(gradient)
            if part.grad is not None and self._shards.counts_here(name):
                squares += part.grad.double().pow(2).sum().cpu()
        norm = float(_sum_in_order(squares, part_device(self._parts)).sqrt())
        scale = min(1.0, limit / (norm + 1e-6))
        for part in self._parts.values():
            if part.grad is not None and scale < 1.0:
                part.grad.mul_(scale)
        return norm


def part_device(parts: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device that the parts are on."""
    return next(iter(parts.values())).device


def _sum_in_order(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the sum of all ranks' ``value``, added up in the order of ranks, so that all get the same bits."""
    mine = value.to(device)
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).sum(0).cpu()
