"""One deadline for a chain of waits."""

from __future__ import annotations

import math
import time

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

    @property
    def milliseconds(self) -> int | None:
        """What ``poll`` takes: rounded up, 0 when no time is left, None for a wait that never ends."""
        return None if math.isinf(self.seconds) else math.ceil(self.remaining * 1000)

    def socket_timeout(self, what: str) -> float | None:
        """Return what ``socket.settimeout`` takes. Raises DeadlineError when no time is left."""
        if self.over:
            raise self.error(what)
        return None if math.isinf(self.seconds) else max(self.remaining, 1e-4)

    def check(self, what: str) -> None:
        """Raise DeadlineError when no time is left."""
        if self.over:
            raise self.error(what)

    def within(self, seconds: float) -> Deadline:
        """Return a deadline ``seconds`` from now that does not outlast this one."""
        return Deadline(min(seconds, self.remaining))

    def error(self, what: str) -> DeadlineError:
        """Return the error that names ``what`` was waited for and how long."""
        return DeadlineError(f"{what}: no answer within {format_duration(self.seconds)}")
