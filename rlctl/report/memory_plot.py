"""The picture of a memory profile, with the ``plots`` extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.report.memory import LETTERS
from rlctl.report.plots import save_figure

if TYPE_CHECKING:
    from rlctl.memory.estimate import Estimate

_GIB = 1 << 30
_MIB = 1 << 20


def save_memory_plot(path: Path, estimate: Estimate, measured: Mapping[str, int] | None, *, title: str) -> None:
    """Draw a stacked bar for each phase, a line at the limit, and a dot where it was measured.

    See ``plots.save_figure``. Call it only where ``plots.can_plot`` holds.
    """
    # Not pyplot: it picks a display backend and keeps every figure alive.
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    unit, name = (_GIB, "GiB") if estimate.peak.nbytes > _GIB else (_MIB, "MiB")
    phases = estimate.phases
    labels = [f"{phase.name} ({phase.devices})" for phase in phases]
    figure = Figure(figsize=(9, 2 + 0.45 * len(phases)), dpi=100, layout="constrained")
    axes = figure.subplots()
    places = range(len(phases))
    left = [0.0] * len(phases)
    colours = colormaps["tab20"].colors
    for number, part in enumerate(LETTERS):
        widths = [phase.parts.get(part, 0) / unit for phase in phases]
        if any(widths):
            axes.barh(places, widths, left=left, color=colours[number], label=part.replace("_", " "))
            left = [a + b for a, b in zip(left, widths, strict=True)]
    if measured:
        dots = [(place, measured[p.name] / unit) for place, p in zip(places, phases, strict=True) if p.name in measured]
        axes.scatter([x for _, x in dots], [y for y, _ in dots], color="black", marker="D", zorder=3, label="measured")
    if 0 < estimate.limit <= 4 * estimate.peak.nbytes:
        axes.axvline(estimate.limit / unit, color="red", linestyle="--", label="memory of a device")
    axes.set_yticks(list(places), labels)
    axes.invert_yaxis()
    axes.set(xlabel=f"{name} on the fullest device", title=title)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5)
    save_figure(figure, path)
