"""A rank that stops while the others generate or train with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rlctl import HybridEngine
from rlctl.errors import RlctlError
from tests.hybrid.engine_on_ranks import PROMPTS, engine_of, recorded_rows

Acts = dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]


def go_on_without(
    who: int, number: int, deadline: float, doing: str, inside: bool = False, training: str = "dp+fsdp"
) -> list[object]:
    """Generate or train; then rank ``who`` gets a signal, before or ``inside`` of it, and the others go on. Return what
    they are told, and how long after they began to wait for others the last time."""
    size = dist.get_world_size()
    engine = engine_of("llama", 1, tp_size=2, dp_size=size // 2, deadline=deadline, training_parallel=training)
    prepare, act = acts(engine)[doing]
    act(prepare())

    def stop(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)  # a stop takes effect a moment later

    stops = dist.get_rank() == who
    if stops and inside and doing.startswith("backward"):
        engine.training.model.model.layers[-1].register_full_backward_hook(stop)
    prepared = prepare()
    dist.barrier()
    if stops and not inside:
        stop()
    if stops:
        dist.all_gather = stop
    begun = [time.monotonic()]
    for name in ("all_reduce", "all_gather", "all_gather_single", "reduce_scatter_single"):
        setattr(dist, name, _noted(getattr(dist, name), begun))
    try:
        act(prepared)
    except RlctlError as error:
        return [str(error), time.monotonic() - begun[-1]]
    return ["", 0.0]


def acts(engine: HybridEngine) -> Acts:
    """Return what is done together: what comes first, and what is done with that."""
    rows = recorded_rows("llama", 1)

    def loss() -> torch.Tensor:
        return engine.compute_loss(rows)

    return {
        "generation": (lambda: None, lambda _: engine.rollout(PROMPTS, 64)),
        "training": (lambda: None, lambda _: engine.update(rows)),
        "a switch": (engine.switch_to_training, lambda _: engine.switch_to_rollout()),
        "backward": (loss, lambda loss: loss.backward()),
        "backward of a sum": (lambda: (loss() + loss()) / 2, lambda mean: torch.autograd.backward([mean])),
        "optimizer step": (lambda: loss().backward(), lambda _: engine.optimizer.step()),
        "clipping": (lambda: loss().backward(), lambda _: engine.optimizer.clip_grad_norm_(1.0)),
    }


def _noted(collective: Any, begun: list[float]) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        begun.append(time.monotonic())
        return collective(*arguments, **options)

    return call
