"""Comparing two tellings of the same numbers, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlctl.experience.rows import Row
from rlctl.replay.findings import Difference

Column = Callable[[Row], Any]


def column_difference(stage: str, name: str, found: Sequence[Row], told: Sequence[Row]) -> Difference | None:
    """Return how the column ``name`` of rows differs; None when it is the same in all bits.

    Raises:
        ValueError: the two have other rows.
    """
    worst, differs = 0.0, False
    for mine, theirs in zip(found, told, strict=True):
        a, b = getattr(mine, name), getattr(theirs, name)
        if a is None and b is None:
            continue
        if a is None or b is None or np.shape(a) != np.shape(b):
            return Difference(stage, name)
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype == y.dtype and x.tobytes() == y.tobytes():
            continue
        differs = True
        worst = max(worst, _largest(np.abs(x.astype(np.float64) - y.astype(np.float64))))
    return Difference(stage, name, worst) if differs else None


def metrics_difference(
    stage: str, found: Mapping[str, float], told: Mapping[str, float], *, relative: float = 0.0
) -> Difference | None:
    """Return the first figure of ``found`` that is not the same in ``told``, within ``relative``, or is not there."""
    for name, value in found.items():
        if name not in told:
            return Difference(stage, name)
        other = told[name]
        if value != other and not (math.isnan(value) and math.isnan(other)):
            gap = abs(value - other)
            if gap <= relative * abs(other):
                continue
            return Difference(stage, name, gap if math.isfinite(gap) else None)
    return None


def state_difference(stage: str, found: Any, told: Any, path: str = "") -> Difference | None:
    """Return where two states (nested mappings of tensors and plain values) first differ."""
    if isinstance(found, Mapping) and isinstance(told, Mapping):
        for key in sorted(found.keys() | told.keys()):
            name = f"{path}/{key}" if path else str(key)
            if key not in found or key not in told:
                return Difference(stage, name)
            if difference := state_difference(stage, found[key], told[key], name):
                return difference
        return None
    if isinstance(found, torch.Tensor) and isinstance(told, torch.Tensor):
        a, b = found.detach().cpu(), told.detach().cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            return Difference(stage, path)
        if torch.equal(a, b):
            return None
        return Difference(stage, path, _largest((a.double() - b.double()).abs().numpy()))
    if found == told:
        return None
    numbers = isinstance(found, int | float) and isinstance(told, int | float)
    return Difference(stage, path, abs(found - told) if numbers else None)


def _largest(gaps: Any) -> float:
    finite = gaps[np.isfinite(gaps)]
    return float(finite.max()) if finite.size else 0.0
