"""Stopping on a signal: the first asks for a checkpoint at the next step boundary, the second ends at once."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """While entered, SIGTERM and SIGUSR1 set ``requested`` to their name instead of ending the process."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
