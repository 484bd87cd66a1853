"""A process that was started, wherever it runs."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from contextlib import suppress
from typing import Protocol


class Running(Protocol):
    """What a ``Child`` needs of its process."""

    @property
    def pid(self) -> int:
        """Its id where it runs."""

    @property
    def ended(self) -> bool:
        """Whether its end has been seen."""

    def wait(self, seconds: float) -> bool:
        """Whether it ends in time; what it left behind in its group is ended then."""

    def signal(self, number: int, *, group: bool) -> None:
        """Send a signal to it, or to its whole group; ``ended`` was false just now."""

    def ending(self) -> str:
        """Return in words how it ended; it has."""


class LocalProcess:
    """A child of this process; a Running. It leads a group of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def returncode(self) -> int:
        """Its exit status; it has ended."""
        assert self._process.returncode is not None
        return self._process.returncode

    def wait(self, seconds: float) -> bool:
        if self.ended:
            return True
        try:
            self._process.wait(None if math.isinf(seconds) else seconds)
        except subprocess.TimeoutExpired:
            return False
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return True

    def signal(self, number: int, *, group: bool) -> None:
        # Its exit status has not been collected, so the id cannot be another process's by now.
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def ending(self) -> str:
        return describe_exit(self.returncode)


def describe_exit(returncode: int) -> str:
    """Return an exit status in words: ``SIGSEGV`` or ``exit code 3``."""
    return signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
