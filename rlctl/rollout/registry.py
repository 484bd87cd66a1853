"""The tables of rollout engines, and of what serves each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlctl.registry import Registry
from rlctl.rollout.traits import EngineTraits

if TYPE_CHECKING:
    from rlctl.rollout.base import RolloutEngine
    from rlctl.rollout.on_ranks import RankRollout, RankRolloutSetup
    from rlctl.rollout.remote.setup import ReplicaSetup
    from rlctl.rollout.served import Served

ROLLOUT_ENGINES: Registry[type[RolloutEngine]] = Registry(
    "rollout engine",
    {
        "transformers": "rlctl.rollout.embedded.engine:EmbeddedEngine",
        "recorded": "rlctl.rollout.recorded.engine:RecordedEngine",
    },
    group="rlctl.rollout_engines",
    base="rlctl.rollout.base:RolloutEngine",
)

# Engines that bring their own way of being served; see ``serving.make_served``.
SERVED_ENGINES: Registry[Callable[[ReplicaSetup], Served]] = Registry(
    "served rollout engine",
    {"vllm": "rlctl.rollout.vllm.served:VllmServed", "sglang": "rlctl.rollout.sglang.setup:serve"},
)

# Engines that generate on the trainer's own ranks, each of which makes its part there.
RANK_ENGINES: Registry[Callable[[RankRolloutSetup], RankRollout]] = Registry(
    "rollout engine of the hybrid layout",
    {"transformers": "rlctl.hybrid.device:HybridDevice", "vllm": "rlctl.hybrid.device:HybridDevice"},
)


def declared_traits(engine: str) -> EngineTraits | None:
    """Return what an engine of another package says of itself by a class attribute ``traits``, None where it says
    nothing. ``engine`` is the configured name, with or without a path after a colon."""
    name = engine.partition(":")[0]
    found = getattr(ROLLOUT_ENGINES.load(name), "traits", None) if name in ROLLOUT_ENGINES.names() else None
    return found if isinstance(found, EngineTraits) else None
