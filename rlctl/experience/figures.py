"""Figures as JSON can hold them: numbers that are not finite are words there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

Figure = float | Literal["nan", "inf", "-inf"]


def figures_out(metrics: Mapping[str, float]) -> dict[str, Figure]:
    """Return metrics as JSON can hold them."""
    return {name: _figure(float(value)) for name, value in metrics.items()}


def figures_in(metrics: Mapping[str, Figure]) -> dict[str, float]:
    """Return the metrics again."""
    return {name: float(value) for name, value in metrics.items()}


def _figure(value: float) -> Figure:
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
