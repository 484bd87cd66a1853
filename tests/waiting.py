"""Waiting for what other threads and processes do: until it is so, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def until(holds: Callable[[], T], what: str = "what the test waits for", seconds: float = 120.0) -> T:
    """Return what ``holds`` says as soon as that counts as true; fail when it does not in time."""
    limit = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < limit, f"not within {seconds} s: {what}"
        time.sleep(0.002)
    return found


def gone(pid: int, within: float = 5.0) -> bool:
    """Whether process ``pid`` ends in time; one that waits to be collected counts as ended."""
    limit = time.monotonic() + within
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False
