"""One deadline for a chain of waits."""

from __future__ import annotations

import time

from rlctl.errors import RlctlError
from rlctl.sync.errors import DeadlineError
from rlctl.units import format_duration


class Deadline:
    """A moment on the monotonic clock.

    Args:
        seconds: from now; ``math.inf`` never ends.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begin = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.seconds - self.elapsed)

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return self.elapsed >= self.seconds

    def socket_timeout(self, what: str) -> float | None:
        """Return what ``socket.settimeout`` takes. Raises DeadlineError when no time is left."""
        if self.over:
            raise self.error(what)
        return None if self.seconds == float("inf") else max(self.remaining, 1e-4)

    def check(self, what: str) -> None:
        """Raise DeadlineError when no time is left."""
        if self.over:
            raise self.error(what)

    def within(self, seconds: float) -> Deadline:
        """Return a deadline ``seconds`` from now that does not outlast this one."""
        return Deadline(min(seconds, self.remaining))

    def error(self, what: str) -> RlctlError:
        """Return the error that names ``what`` was waited for and how long."""
        return DeadlineError(f"{what}: no answer within {format_duration(self.seconds)}")
