"""A private folder that tells, by a lock, whether the run that it belongs to still lives.

Processes that a run starts carry the folder's path in their environment. So what a killed run leaves, processes and
folder, is found and ended by the next one, and nothing else is touched.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "RLCTL_RUN_FOLDER"
_PREFIX = "rlctl-run-"
_LOCK = "lock"
# A socket's path has at most 107 bytes, and Ray adds this many to its folder's.
_LONGEST = 107 - 66
_ENDING_SECONDS = 10.0


class RunFolder:
    """The folder of this run, mode 0700; it lives until ``close``."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_root()))
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                break
            os.close(self._lock)  # another run took it for a dead one's before it was locked

    @property
    def env(self) -> dict[str, str]:
        """What the run's processes have in their environment."""
        # Processes that set a title of their own, as vLLM's do, would write it over what the kernel shows of theirs.
        return {VARIABLE: str(self.path), "SPT_NOENV": "1"}

    def close(self) -> None:
        """Remove the folder. Harmless when repeated."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def end_leftovers() -> list[int]:
    """End what runs of this user have left on this machine that were killed themselves; return the ids of the
    processes that were ended."""
    dead = [(folder, lock) for folder in _folders() if (lock := _lock_of_dead(folder)) is not None]
    if not dead:
        return []
    found = [pid for folder, _ in dead for pid in _processes_of(folder)]
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + _ENDING_SECONDS
    while any(_started_by(pid) is not None for pid in found) and time.monotonic() < end:
        time.sleep(0.01)
    for folder, lock in dead:
        _remove(folder)
        os.close(lock)
        log.info("ended what a killed run left: %s, %d processes", folder, len(found))
    return found


def _remove(folder: Path) -> None:
    """Remove a folder in which processes that are about to end may still write."""
    end = time.monotonic() + _ENDING_SECONDS
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
        shutil.rmtree(folder, ignore_errors=True)


def _root() -> str:
    """Return where run folders are: the user's place for temporary files, unless its path is too long for sockets."""
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) + len(_PREFIX) + 9 <= _LONGEST else "/tmp"  # noqa: S108


def _folders() -> Iterator[Path]:
    for folder in Path(_root()).glob(f"{_PREFIX}*"):
        with suppress(FileNotFoundError):
            if folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink():
                yield folder


def _lock_of_dead(folder: Path) -> int | None:
    """Return the lock of a run that is no more, now held by the caller; None when it lives, or just begins."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _processes_of(folder: Path) -> list[int]:
    wanted = str(folder)
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _started_by(pid) == wanted]


def _started_by(pid: int) -> str | None:
    """Return the folder of the run that a process was started by; None when there is none, or it has ended."""
    try:
        words = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:  # ended, or another user's
        return None
    mark = os.fsencode(f"{VARIABLE}=")
    return next((os.fsdecode(word.removeprefix(mark)) for word in words if word.startswith(mark)), None)
