"""How long replicas were at work, of the time in which they could be."""

from __future__ import annotations

import time


class BusyTime:
    """Sums over replicas, of the states between two ``mark``s."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._states = (0, 0)
        self._busy = self._there = 0.0

    def mark(self, busy: int, there: int) -> None:
        """From now on so many replicas decode, of those that are there."""
        now = time.monotonic()
        self._busy += self._states[0] * (now - self._since)
        self._there += self._states[1] * (now - self._since)
        self._since, self._states = now, (busy, there)

    def take(self) -> tuple[float, float]:
        """Return the seconds in which replicas decoded, and those in which they were there, and begin anew. The state
        was marked just now."""
        found = self._busy, self._there
        self._busy = self._there = 0.0
        return found
