"""A curve in text: block characters, or ASCII where a terminal has no others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:#"


def format_curve(
    values: Sequence[float],
    *,
    title: str,
    first: int = 1,
    width: int = 80,
    height: int = 8,
    unicode: bool = True,
) -> str:
    """Return the lines of a bar chart of ``values`` over their position, each ended by a newline.

    The scale starts at zero, or at the lowest value when that is negative. With more values than columns a column
    shows the mean of its share; a column of NaNs stays empty.

    Args:
        values: one a step, in order.
        title: printed above.
        first: number of the first value, for the axis.
        width: columns of the whole chart.
        height: lines of the bars.
        unicode: block characters; else ``#``, ``:`` and ``.``.
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return f"{title}: no values\n"
    low, high = min(0.0, *finite), max(finite)
    high = high if high > low else low + 1.0
    labels = [f"{high:.3g}", f"{low:.3g}"]
    margin = max(map(len, labels))
    heights = [
        None if mean is None else (mean - low) / (high - low) for mean in _columns(values, max(1, width - margin - 2))
    ]
    levels = _BLOCKS if unicode else _ASCII
    lines = [title]
    for row in range(height - 1, -1, -1):
        label = labels[0] if row == height - 1 else labels[1] if row == 0 else ""
        bars = "".join(_cell(share, row, height, levels) for share in heights)
        lines.append(f"{label:>{margin}} {'│' if unicode else '|'}{bars}".rstrip())
    start, end = str(first), str(first + len(values) - 1)
    gap = len(heights) - len(start) - len(end)
    lines.append(f"{'':>{margin}}  {start}{' ' * gap}{end}" if gap > 0 else f"{'':>{margin}}  {end}")
    return "".join(f"{line}\n" for line in lines)


def format_sparkline(values: Sequence[float], *, width: int, unicode: bool = True) -> str:
    """Return one line that shows the course of the latest values, at most ``width`` columns wide."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, high = min(0.0, *finite), max(finite)
    high = high if high > low else low + 1.0
    levels = _BLOCKS[1:] if unicode else _ASCII[1:]
    return "".join(
        " " if not math.isfinite(v) else levels[round((v - low) / (high - low) * (len(levels) - 1))]
        for v in values[-width:]
    )


def _columns(values: Sequence[float], width: int) -> list[float | None]:
    """Return one mean a column. Fewer values than columns: each value takes as many whole columns as fit."""
    if len(values) <= width:
        repeat = width // len(values)
        return [_mean([value]) for value in values for _ in range(repeat)]
    edges = [i * len(values) // width for i in range(width + 1)]
    return [_mean(values[start:stop]) for start, stop in pairwise(edges)]


def _mean(values: Sequence[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def _cell(share: float | None, row: int, height: int, levels: str) -> str:
    if share is None:
        return " "
    # A zero is a value too: it shows as the thinnest bar, and a gap stays a gap.
    full = len(levels) - 1
    filled = max(1, round(share * height * full))
    return levels[max(0, min(full, filled - row * full))]
