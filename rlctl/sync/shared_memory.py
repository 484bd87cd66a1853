"""Segments of shared memory: made once, touched once, mapped by every process of a node that reads them.

A nameless segment (memfd) is handed over through a unix socket and is gone with the last process that maps it. A named
one lies in /dev/shm for processes that no socket joins; its name says who made it, so that what a killed run left
behind can be found and removed. Both have mode 0600.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import stat
import warnings
from pathlib import Path

import torch

from rlctl.errors import UnavailableError, UsageError
from rlctl.sync.errors import CorruptedError
from rlctl.units import format_bytes

FOLDER = Path("/dev/shm")  # noqa: S108 - the system's own folder of shared memory; files are made O_EXCL, mode 0600
_NAME = re.compile(r"rlctl-(?P<uid>\d+)-(?P<space>\d+)-(?P<pid>\d+)-(?P<start>\d+)-(?P<run>[\w.]+)-(?P<label>[\w.]+)")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of linux/fcntl.h (5.1): whoever maps it from now on can only read


class Segment:
    """One segment, mapped.

    Attributes:
        memory: its bytes, a uint8 CPU tensor.
        fd: the open file, to be handed over.
        path: of a named segment, else None.
    """

    def __init__(self, fd: int, nbytes: int, path: Path | None = None, *, writable: bool = True) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.path = path
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # MAP_POPULATE: page faults now, not in the first sync.
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=access)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int, *, label: str = "weights", own: bool = False) -> Segment:
        """Make a nameless segment; its size is sealed, so no process can cut it short under another's feet. ``own``:
        processes that it is handed to can only read it.

        Raises UnavailableError when the system has not that much shared memory.
        """
        fd = os.memfd_create(f"rlctl-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        _reserve(fd, nbytes, "shared memory")
        segment = cls(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | (_FUTURE_WRITE if own else 0))
        return segment

    @classmethod
    def create_named(cls, nbytes: int, *, run: str, label: str = "weights") -> Segment:
        """Make a segment under a name of this user, process and ``run`` (the run's public name, not its token).

        ``run`` and ``label`` are letters, digits, dots and underscores.
        """
        path = FOLDER / segment_name(run, label)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _reserve(fd, nbytes, str(FOLDER))
        except UnavailableError:
            path.unlink()
            raise
        return cls(fd, nbytes, path)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Segment:
        """Map a segment whose file was handed over; ``fd`` belongs to the result. Of one that is its maker's ``own``
        the memory can only be read: writing into it ends the process.

        Raises CorruptedError when the file has another size, or its size could still change.
        """
        found = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if found != nbytes or seals & _SEALS != _SEALS:
            os.close(fd)
            raise CorruptedError(f"shared memory of {found} bytes, unsealed or not of the {nbytes} announced")
        return cls(fd, nbytes, writable=not seals & _FUTURE_WRITE)

    @classmethod
    def open_named(cls, path: Path) -> Segment:
        """Map the named segment at ``path``. Raises UsageError when it is not a private file of this user."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o600 or not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise UsageError("not a private segment of this user", where=str(path))
        return cls(fd, found.st_size, path)

    def close(self) -> None:
        """Give up the file and the name. The mapping goes with the last tensor that looks into it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        del self.memory, self._map

    def unlink(self) -> None:
        """Remove the name of a named segment; who has it mapped keeps it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


def segment_name(run: str, label: str) -> str:
    """Return the name of a segment of this process: user, process namespace, process, its start time, run, label."""
    pid = os.getpid()
    start = _start_time(pid)
    assert start is not None
    name = f"rlctl-{os.getuid()}-{_namespace()}-{pid}-{start}-{run}-{label}"
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"{run!r} or {label!r} cannot be part of a segment's name", fix="letters, digits, . and _")
    return name


def remove_leftovers() -> list[str]:
    """Remove what this user's processes that are gone have left under such names (segments, sockets, folders), and
    return the names.

    A process of another namespace (a container that shares /dev/shm) is not judged: it cannot be seen from here.
    """
    removed = []
    for path in sorted(FOLDER.glob(f"rlctl-{os.getuid()}-{_namespace()}-*")):
        match = _NAME.fullmatch(path.name)
        if match is not None and _start_time(int(match["pid"])) != match["start"]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _reserve(fd: int, nbytes: int, where: str) -> None:
    os.fchmod(fd, 0o600)
    try:
        # Writing to a hole of a full tmpfs is a bus error; reserving it is an error that can be told.
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.ENOSPC:
            raise
        raise UnavailableError(
            f"no room for {format_bytes(nbytes)} of shared memory",
            where=where,
            fix="a larger /dev/shm (docker run --shm-size), a smaller sync.bucket_size, or another backend",
        ) from error


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _start_time(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Fields after the command, which may hold blanks and parentheses; the start time is field 22 of proc(5).
    return text.rpartition(")")[2].split()[19]
