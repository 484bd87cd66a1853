"""Learning rate as a pure function of the optimizer step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from rlctl.schema.training import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, total: int) -> float:
    """Return the rate of optimizer step ``update`` (from 0) out of ``total``."""
    floor = config.lr * config.min_lr_ratio
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(total - config.warmup_steps, 1)
    done = min((update - config.warmup_steps) / span, 1.0)
    if config.schedule == "linear":
        return floor + (config.lr - floor) * (1.0 - done)
    return floor + (config.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
