"""The lock of a run folder: who trains there, or prunes, holds it; who only reads asks whether it is held."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import BinaryIO

from rlctl.keys.tensor_file import TensorFileError, open_regular

LOCK = ".lock"
_LOOKING = 0.2
"""Seconds; whoever only looks whether the lock is held has it for far less."""


def take(lock: BinaryIO) -> None:
    """Hold the lock until the file is closed. Raises OSError when another process does."""
    deadline = time.monotonic() + _LOOKING
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def under_way(run: Path) -> bool:
    """Whether a process trains in a run folder, or prunes it."""
    try:
        handle, _ = open_regular(run / LOCK)
    except (OSError, TensorFileError):
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False
