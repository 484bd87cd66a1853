"""Turning termination signals into exceptions, so that what was begun is cleaned up before the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class StoppedBySignalError(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; treated like Ctrl-C by whoever would handle that."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise StoppedBySignalError instead of killing the process at once.

    Only where the signal has its default action, and only in the main thread: a program that handles its signals
    keeps its own handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Within the block SIGINT, SIGTERM and SIGHUP wait: a cleanup or a rename in two steps is not torn by a signal.

    What arrived meanwhile is delivered at the end. Elsewhere than in the main thread no signal raises anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    # Handlers, not a blocked mask: another thread would take a blocked signal and the main thread would still raise.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_SIGNALS)}
    for number in handlers:
        signal.signal(number, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def _raise(number: int, _frame: FrameType | None) -> None:
    raise StoppedBySignalError(signal.Signals(number).name)
