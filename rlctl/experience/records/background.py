"""A thread that writes while the run goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

# Steps that may wait to be written: each holds its rows in memory.
_WAITING = 2


class Background:
    """Does what it is given in order, on one thread, which is started with the first.

    What is given must not raise. ``give`` waits while as much as may wait does: memory is bounded, a slow disk slows
    the run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None

    def give(self, act: Callable[[], None]) -> None:
        """Have ``act`` done after what was given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(act)

    def drain(self) -> None:
        """Wait until everything that was given is done."""
        self._work.join()

    def close(self) -> None:
        """Drain and end the thread. Harmless when repeated."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (act := self._work.get()) is not None:
            try:
                act()
            finally:
                self._work.task_done()
        self._work.task_done()
