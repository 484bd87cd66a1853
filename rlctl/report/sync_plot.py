"""The picture of a sync bench, with the ``plots`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.report.plots import save_figure


def save_sync_plot(path: Path, bars: Sequence[tuple[str, float]], limit: float, *, title: str) -> None:
    """Draw a bar for each (label, GiB/s) and a line at the limit.

    See ``plots.save_figure``. Call it only where ``plots.can_plot`` holds.
    """
    # Not pyplot: it picks a display backend and keeps every figure alive.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 + 0.4 * len(bars)), dpi=100, layout="constrained")
    axes = figure.subplots()
    labels, speeds = zip(*bars, strict=True)
    drawn = axes.barh(labels, speeds, color="tab:blue")
    axes.bar_label(drawn, fmt="%.2f", padding=3)
    axes.axvline(limit, color="black", linestyle="--", label=f"memory copy, {limit:.2f}")
    axes.invert_yaxis()
    axes.set(xlabel="GiB/s by the median", title=title)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower right")
    save_figure(figure, path)
