"""Gradients of the hybrid engine's loss, taken in the ways that scripts take them."""

from __future__ import annotations

from typing import Any

import torch

from tests.hybrid.engine_on_ranks import engine_of, recorded_rows


def gradients_by_ways(name: str, seed: int, training: str) -> dict[str, Any]:
    """Return how far this rank's gradients of two losses are from those of the training engine's own, and what clipping
    makes of the norm of all ranks'."""
    engine = engine_of(name, seed, training_parallel=training)
    first, second = recorded_rows(name, seed), recorded_rows(name, seed + 1)

    def gradients() -> torch.Tensor:
        found = torch.cat([p.grad.to_local().flatten() for p in engine.parameters()])
        engine.optimizer.zero_grad()
        return found

    for rows in (first, second):
        engine.training.loss(rows, engine._loss).backward()
    expected = gradients()

    def added() -> None:
        engine.compute_loss(first).backward()
        engine.compute_loss(second).backward()

    def apart() -> None:
        losses = [engine.compute_loss(rows) for rows in (first, second)]
        for loss in losses:
            loss.backward()

    def summed() -> None:
        (engine.compute_loss(first) + engine.compute_loss(second)).backward()

    def meant() -> None:
        (torch.stack([engine.compute_loss(rows) for rows in (first, second)]).mean() * 2).backward()

    def retained() -> None:
        loss = engine.compute_loss(first)
        (loss / 4).backward(retain_graph=True)
        (loss / 4 * 3 + engine.compute_loss(second)).backward()

    ways = {
        "added": added,
        "apart": apart,
        "retained": retained,
        "summed": summed,
        "mean": meant,
        "autograd": lambda: torch.autograd.backward([engine.compute_loss(rows) for rows in (first, second)]),
    }
    differences = {}
    for way, act in ways.items():
        act()
        differences[way] = float((gradients() - expected).abs().max())
    added()
    shards = engine.training.shards
    whole = torch.cat([shards.gather(n, p.grad.to_local()).flatten() for n, p in shards.parameters.items()]).norm()
    norm = engine.optimizer.clip_grad_norm_(float(whole) / 2)
    clipped = engine.optimizer.clip_grad_norm_(float("inf"))
    return {
        "largest": float(expected.abs().max()),
        "differences": differences,
        "whole": float(whole),
        "norm": norm,
        "clipped": clipped,
    }
