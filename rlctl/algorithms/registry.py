"""Algorithms by name, known without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlctl.registry import Registry

if TYPE_CHECKING:
    import torch

    from rlctl.algorithms.losses import LossResult

ADVANTAGES: Registry[Callable[..., torch.Tensor]] = Registry(
    "advantage estimator", {"grpo": "rlctl.algorithms.advantages:grpo"}
)
LOSSES: Registry[Callable[..., LossResult]] = Registry("policy loss", {"ppo_clip": "rlctl.algorithms.losses:ppo_clip"})
