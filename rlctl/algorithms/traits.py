"""What the built-in estimators and losses need, as data: known without torch, so that a dry run can check it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rlctl.algorithms.registry import ADVANTAGES, LOSSES

#: Built-in estimator -> whether it needs a critic's values.
_NEEDS_VALUES: Mapping[str, bool] = MappingProxyType(
    {"grpo": False, "rloo": False, "reinforce_pp": False, "reinforce_pp_baseline": False, "gae": True}
)
#: Built-in estimator -> whether it compares the responses of a group.
_NEEDS_GROUPS: Mapping[str, bool] = MappingProxyType(
    {"grpo": True, "rloo": True, "reinforce_pp": False, "reinforce_pp_baseline": True, "gae": False}
)
#: Built-in loss -> whether it is weighed by the ratio to the old policy, which corrects by itself.
_HAS_RATIO: Mapping[str, bool] = MappingProxyType({"ppo_clip": True, "gspo": True, "cispo": True, "reinforce": False})

#: Built-in losses in which a token's gradient is a multiple of its advantage.
_FOLLOWS_ADVANTAGE = frozenset({"ppo_clip", "gspo", "cispo", "reinforce"})


def needs_values(advantage: str) -> bool:
    """Whether the estimator needs a critic. Another package's says so by an attribute ``needs_values``."""
    if advantage in _NEEDS_VALUES:
        return _NEEDS_VALUES[advantage]
    return bool(getattr(ADVANTAGES.load(advantage), "needs_values", False))


def needs_groups(advantage: str) -> bool:
    """Whether the estimator needs several responses a prompt; attribute ``needs_groups``, True unless it says no."""
    if advantage in _NEEDS_GROUPS:
        return _NEEDS_GROUPS[advantage]
    return bool(getattr(ADVANTAGES.load(advantage), "needs_groups", True))


def has_ratio(loss: str) -> bool:
    """Whether the loss is weighed by the ratio to the old policy; attribute ``has_ratio``, True unless it says no."""
    if loss in _HAS_RATIO:
        return _HAS_RATIO[loss]
    return bool(getattr(LOSSES.load(loss), "has_ratio", True))


def follows_advantage(loss: str) -> bool:
    """Whether a token with advantage 0 has no gradient; attribute ``follows_advantage``, False unless it says yes."""
    return loss in _FOLLOWS_ADVANTAGE or bool(getattr(LOSSES.load(loss), "follows_advantage", False))
