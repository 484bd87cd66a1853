"""Progress of long work: a moving bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlctl.report.panel import Panel
from rlctl.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_EVERY_S = 10.0
LINE_EVERY_FRACTION = 0.1
# Work that is over in a moment needs no account of its tenths.
LINE_NOT_BEFORE_S = 1.0


class Pace:
    """When the next plain line is due: a tenth of the work further on, or ten seconds later.

    Args:
        clock: seconds, from anywhere.
        least_s: never sooner than this after the line before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, least_s: float = 0.0) -> None:
        self._clock = clock
        self._least_s = least_s
        self._last_time = clock()
        self._last_fraction = 0.0

    def due(self, fraction: float | None) -> bool:
        """Tell whether to print now; saying yes starts the next wait."""
        now = self._clock()
        if now - self._last_time < self._least_s:
            return False
        far = fraction is not None and fraction - self._last_fraction >= LINE_EVERY_FRACTION - 1e-9
        if not far and now - self._last_time < LINE_EVERY_S:
            return False
        self._last_time = now
        self._last_fraction = fraction or 0.0
        return True


class Progress(ABC):
    """How far one piece of work is."""

    @abstractmethod
    def advance(self, amount: float = 1) -> None:
        """Count ``amount`` more, in the unit of the work."""

    @abstractmethod
    def _close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


class SilentProgress(Progress):
    """Nothing is shown."""

    def advance(self, amount: float = 1) -> None:
        """Count, and show nothing."""

    def _close(self) -> None:
        pass


class PlainProgress(Progress):
    """Whole lines: when ``Pace`` says so, and at the end."""

    def __init__(
        self,
        say: Callable[[str], None],
        label: str,
        total: float | None,
        unit: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._label = label
        self._total = total
        self._unit = unit
        self._clock = clock
        self._start = clock()
        self._pace = Pace(clock, least_s=LINE_NOT_BEFORE_S)
        self._done = 0.0
        self._said: float | None = None

    def advance(self, amount: float = 1) -> None:
        """Count, and print a line when one is due."""
        self._done += amount
        if self._pace.due(self._done / self._total if self._total else None):
            self._print()

    def _close(self) -> None:
        if self._said != self._done:
            self._print()

    def _print(self) -> None:
        self._said = self._done
        amount = _amount(self._done, self._unit)
        if self._total:
            amount = f"{self._done / self._total:4.0%} ({amount} of {_amount(self._total, self._unit)})"
        self._say(f"{self._label}: {amount}, {format_duration(self._clock() - self._start)}")


class LiveProgress(Progress):
    """One bar that redraws itself."""

    def __init__(self, panel: Panel, label: str, total: float | None, unit: str) -> None:
        self._panel = panel.__enter__()
        self._label = label
        self._total = total
        self._unit = unit
        self._done = 0.0
        self._start = time.monotonic()
        self._drawn = float("-inf")
        self.advance(0)

    def advance(self, amount: float = 1) -> None:
        """Count, and redraw ten times a second at most."""
        self._done += amount
        now = time.monotonic()
        if now - self._drawn >= 0.1:
            self._drawn = now
            self._panel.draw(self._picture(now - self._start))

    def _picture(self, seconds: float) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        row = Table.grid(padding=(0, 1))
        shown = _amount(self._done, self._unit)
        if self._total:
            shown = f"{self._done / self._total:4.0%} ({shown} of {_amount(self._total, self._unit)})"
            row.add_row(self._label, ProgressBar(self._total, self._done, width=30), shown, format_duration(seconds))
        else:
            row.add_row(self._label, shown, format_duration(seconds))
        return row

    def _close(self) -> None:
        self._panel.__exit__(None, None, None)


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:g} {unit}".rstrip()
