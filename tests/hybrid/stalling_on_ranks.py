"""A rank that stops while the others generate or train with it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from rlctl.errors import RlctlError
from tests.hybrid.engine_on_ranks import PROMPTS, engine_of, recorded_rows


def go_on_without(who: int, number: int, deadline: float, doing: str) -> list[object]:
    """Generate or train; then rank ``who`` gets a signal and the others go on. Return what they are told, and how long
    after they began to wait for others the last time."""
    engine = engine_of("llama", 1, tp_size=2, dp_size=dist.get_world_size() // 2, deadline=deadline)
    rows = recorded_rows("llama", 1)
    act = {
        "generation": lambda: engine.rollout(PROMPTS, 64),
        "training": lambda: engine.update(rows),
        "a switch": lambda: (engine.switch_to_training(), engine.switch_to_rollout()),
    }[doing]
    act()
    dist.barrier()
    if dist.get_rank() == who:
        os.kill(os.getpid(), number)
        time.sleep(60)  # a stop takes effect a moment later
    begun = [time.monotonic()]
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, _noted(getattr(dist, name), begun))
    try:
        act()
    except RlctlError as error:
        return [str(error), time.monotonic() - begun[-1]]
    return ["", 0.0]


def _noted(collective: Any, begun: list[float]) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        begun.append(time.monotonic())
        return collective(*arguments, **options)

    return call
