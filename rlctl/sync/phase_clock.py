"""Where the time of a transfer goes: wall seconds by phase, each moment counted once, and CPU seconds of the whole."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

PHASES = ("gather", "pack", "register", "wire", "unpack", "load")


class PhaseClock:
    """Counts time for the innermost phase that is open; one thread's clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._open: list[str] = []
        self._last = 0.0
        self._cpu = time.process_time()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the process, all threads, since the clock was made."""
        return time.process_time() - self._cpu

    def phase(self, name: str) -> _Phase:
        """Count the time inside for ``name``, except what inner phases take: a context manager."""
        return _Phase(self, name)

    def timed(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield ``items``; the time of making each is counted for ``name``."""
        iterator = iter(items)
        while True:
            self.enter(name)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.leave()
            yield item

    def enter(self, name: str) -> None:
        """Begin a phase inside the one that is open."""
        self._switch()
        self._open.append(name)

    def leave(self) -> None:
        """End the innermost phase."""
        self._switch()
        self._open.pop()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        self._last = now


class _Phase:
    """Entered for every bucket, so it is no generator."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._clock.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._clock.leave()
