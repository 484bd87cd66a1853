"""A rank that stops while the others generate with it."""

from __future__ import annotations

import os
import signal
import time

import torch.distributed as dist

from rlctl.errors import RlctlError
from tests.hybrid.engine_on_ranks import PROMPTS, engine_of


def generate_without(who: int, number: int, deadline: float) -> list[object]:
    """Generate; then rank ``who`` gets a signal and the others go on. Return what they are told, and after how long."""
    engine = engine_of("llama", 1, tp_size=2, dp_size=dist.get_world_size() // 2, deadline=deadline)
    engine.rollout(PROMPTS, 4)
    if dist.get_rank() == who:
        os.kill(os.getpid(), number)
        time.sleep(60)  # a stop takes effect a moment later
    begin = time.monotonic()
    try:
        engine.rollout(PROMPTS, 64)
    except RlctlError as error:
        return [str(error), time.monotonic() - begin, signal.Signals(number).name]
    return ["", time.monotonic() - begin, ""]
