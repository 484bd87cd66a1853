"""Small files of one user's own, in a folder that is open: whole or not there, no link followed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlctl.sync.errors import CorruptedError, TransferError

_LIMIT = 1 << 30
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def telling(where: Path) -> Iterator[None]:
    """Turn what the system says of a folder into an error that a user can act on."""
    try:
        yield
    except OSError as error:
        fix = "another folder for backend file: extras={'folder': ...}"
        if error.errno in _NO_ROOM:
            fix = f"make room, keep fewer versions, or {fix}"
        raise TransferError(f"{error.strerror or error}", where=str(where), fix=fix) from error


@contextmanager
def told_apart(where: Path) -> Iterator[None]:
    """Say of damage which folder it is in."""
    try:
        yield
    except CorruptedError as error:
        error.where = error.where or str(where)
        raise


def names_in(folder: int) -> list[str]:
    """Return the names in an open folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def write_whole(name: str, data: bytes, folder: int) -> None:
    """Write a file that is whole whenever it has its name."""
    temporary = f".{name}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def read_small(name: str, folder: int) -> bytes:
    """Return what is in a file of an open folder. Raises FileNotFoundError, CorruptedError."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptedError(f"{name} is a link") from error
        raise
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LIMIT:
            raise CorruptedError(f"{name} is no regular file, or too large")
        return file.read()


def nbytes_in(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())
