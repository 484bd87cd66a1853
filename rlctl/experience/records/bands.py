"""When a figure of a step is odd enough to keep its record."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlctl.errors import UsageError

# A spread is worth something after so many steps, and no older ones count.
_LEAST, _MOST = 8, 32
_FORM = re.compile(r"^(?P<name>[^=~]+)(=(?P<low>.*?)\.\.(?P<high>.*)|~(?P<times>.+))$")


@dataclass(frozen=True)
class Band:
    """Where a figure may lie: between fixed bounds, or ``times`` its spread from the mean of the steps before."""

    name: str
    low: float = -math.inf
    high: float = math.inf
    times: float | None = None

    def outside(self, value: float, before: Sequence[float]) -> str:
        """Return why ``value`` is odd, or "".

        Args:
            before: the figure's values in earlier steps, the latest last.
        """
        if not math.isfinite(value):
            return f"{self.name} is {value}"
        if self.times is None:
            inside = self.low <= value <= self.high
            return "" if inside else f"{self.name} {value:.6g} is outside {self.low:g} to {self.high:g}"
        if len(before) < _LEAST:
            return ""
        mean = math.fsum(before) / len(before)
        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in before) / len(before))
        # A figure that never moved has no spread to measure by: its first move is not odd in itself.
        if spread <= 1e-9 * max(abs(mean), 1e-9) or abs(value - mean) <= self.times * spread:
            return ""
        return f"{self.name} {value:.6g} is {abs(value - mean) / spread:.1f} spreads from {mean:.6g}"


def parse_bands(entries: Sequence[str]) -> list[Band]:
    """Return the bands of ``NAME=LOW..HIGH`` (either may be empty) and ``NAME~TIMES``.

    Raises:
        UsageError: an entry is neither.
    """
    return [_parse(entry) for entry in entries]


def _parse(entry: str) -> Band:
    found = _FORM.match(entry.replace(" ", ""))
    try:
        if found is None:
            raise ValueError("neither form")
        if found["times"] is not None:
            band = Band(found["name"], times=float(found["times"]))
            valid = band.times is not None and band.times > 0 and math.isfinite(band.times)
        else:
            band = Band(found["name"], float(found["low"] or -math.inf), float(found["high"] or math.inf))
            valid = band.low <= band.high
        if not valid:
            raise ValueError("no such band")
    except ValueError as error:
        raise UsageError(
            f"{entry!r} is no band of a figure",
            where="run.record_keep",
            fix="write NAME=LOW..HIGH, as in reward=0.1.., or NAME~TIMES (of its spread), as in grad_norm~6",
        ) from error
    return band


class Bands:
    """Bands over a run's steps, with the figures of those before."""

    def __init__(self, bands: Sequence[Band]) -> None:
        self._bands = bands
        self._before: dict[str, deque[float]] = {band.name: deque(maxlen=_MOST) for band in bands}

    def add(self, metrics: Mapping[str, float]) -> list[str]:
        """Take the figures of a step and return what is odd about them."""
        found = [
            why
            for band in self._bands
            if band.name in metrics and (why := band.outside(metrics[band.name], list(self._before[band.name])))
        ]
        for name, values in self._before.items():
            if name in metrics and math.isfinite(metrics[name]):
                values.append(metrics[name])
        skipped = metrics.get("skipped_updates", 0.0)
        return [*found, f"{skipped:g} updates were skipped"] if skipped else found
