"""Algorithms by name, known without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlctl.registry import Registry

if TYPE_CHECKING:
    from rlctl.algorithms.advantages import Advantages
    from rlctl.algorithms.losses import LossResult

ADVANTAGES: Registry[Callable[..., Advantages]] = Registry(
    "advantage estimator",
    {
        "grpo": "rlctl.algorithms.advantages:grpo",
        "rloo": "rlctl.algorithms.advantages:rloo",
        "reinforce_pp": "rlctl.algorithms.advantages:reinforce_pp",
        "reinforce_pp_baseline": "rlctl.algorithms.advantages:reinforce_pp_baseline",
        "gae": "rlctl.algorithms.gae:gae",
    },
    group="rlctl.advantages",
)
"""Estimators: ``fn(batch: RewardedBatch, *, options) -> Advantages``. The options are the keys of ``algorithm`` that
the signature names."""

LOSSES: Registry[Callable[..., LossResult]] = Registry(
    "policy loss",
    {
        "ppo_clip": "rlctl.algorithms.losses:ppo_clip",
        "gspo": "rlctl.algorithms.losses:gspo",
        "cispo": "rlctl.algorithms.losses:cispo",
        "reinforce": "rlctl.algorithms.losses:reinforce",
    },
    group="rlctl.losses",
)
"""Losses: ``fn(tokens: Tokens, *, options) -> LossResult``; options as above."""
