"""The table of rollout engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.registry import Registry

if TYPE_CHECKING:
    from rlctl.rollout.base import RolloutEngine

ROLLOUT_ENGINES: Registry[type[RolloutEngine]] = Registry(
    "rollout engine",
    {"transformers": "rlctl.rollout.embedded.engine:EmbeddedEngine"},
    group="rlctl.rollout_engines",
    base="rlctl.rollout.base:RolloutEngine",
)
