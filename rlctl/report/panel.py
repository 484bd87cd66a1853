"""Things that redraw themselves on a terminal. The only module that knows rich, which loads on first use."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from rlctl.report.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class StatusHost(Protocol):
    """What owns the status lines: while something redraws itself, they go above it."""

    above: Callable[[str], None] | None


def console(stream: TextIO, terminal: Terminal) -> Console:
    """Return a rich console on a stream that is known to be able to move its cursor."""
    from rich.console import Console

    return Console(
        file=stream, force_terminal=True, no_color=not terminal.color, highlight=False, emoji=False, markup=False
    )


class Panel:
    """One picture at the foot of the terminal, redrawn when told; status lines scroll above it.

    The cursor comes back and the picture goes away at the end of the ``with`` block, also after an error.
    """

    def __init__(self, host: StatusHost, stream: TextIO, terminal: Terminal) -> None:
        from rich.live import Live

        self._host = host
        self._console = console(stream, terminal)
        # No refresh thread: a run forks and computes, and a picture changes only when its numbers do.
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=False)

    def draw(self, picture: RenderableType) -> None:
        """Show ``picture`` in the place of the last one."""
        self._live.update(picture, refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._host.above = self._console.print
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._host.above = None
        self._live.stop()
