"""Progress of long work: a moving bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rlctl.report.terminal import Terminal
from rlctl.units import format_bytes, format_duration

LINE_EVERY_S = 10.0
LINE_EVERY_FRACTION = 0.1


class Pace:
    """When the next plain line is due: a tenth of the work further on, or ten seconds later.

    Args:
        clock: seconds, from anywhere.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_time = clock()
        self._last_fraction = 0.0

    def due(self, fraction: float | None) -> bool:
        """Tell whether to print now; saying yes starts the next wait."""
        now = self._clock()
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
    """Whole lines: at the start, each tenth of the work or ten seconds, and at the end."""

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
        self._pace = Pace(clock)
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

    def __init__(self, stream: TextIO, terminal: Terminal, label: str, total: float | None, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        console = Console(file=stream, force_terminal=True, no_color=not terminal.color)
        self._unit = unit
        self._total = total
        self._done = 0.0
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(label, total=total, amount="")
        self._bar.start()

    def advance(self, amount: float = 1) -> None:
        """Count, and redraw."""
        self._done += amount
        shown = _amount(self._done, self._unit)
        if self._total:
            shown = f"{shown} of {_amount(self._total, self._unit)}"
        self._bar.update(self._task, completed=self._done, amount=shown)

    def _close(self) -> None:
        self._bar.stop()


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:g} {unit}".rstrip()
