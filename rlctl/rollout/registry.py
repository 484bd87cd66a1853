"""The table of rollout engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.registry import Registry
from rlctl.rollout.traits import EngineTraits

if TYPE_CHECKING:
    from rlctl.rollout.base import RolloutEngine

ROLLOUT_ENGINES: Registry[type[RolloutEngine]] = Registry(
    "rollout engine",
    {"transformers": "rlctl.rollout.embedded.engine:EmbeddedEngine"},
    group="rlctl.rollout_engines",
    base="rlctl.rollout.base:RolloutEngine",
)


def declared_traits(engine: str) -> EngineTraits | None:
    """Return what an engine of another package says of itself by a class attribute ``traits``, None where it says
    nothing. ``engine`` is the configured name, with or without a path after a colon."""
    name = engine.partition(":")[0]
    found = getattr(ROLLOUT_ENGINES.load(name), "traits", None) if name in ROLLOUT_ENGINES.names() else None
    return found if isinstance(found, EngineTraits) else None
