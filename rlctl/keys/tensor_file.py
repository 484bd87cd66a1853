"""Reading byte ranges of large tensor files: regular files only, inside their bounds, never a whole file at once."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from rlctl.errors import RlctlError

MAX_OPEN_FILES = 64


class TensorFileError(RlctlError):
    """A tensor file is damaged, hostile, or cannot be read."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as it lies in a file.

    Attributes:
        name: the key.
        dtype: safetensors code, e.g. ``"BF16"``.
        shape: dimensions; ``()`` is a scalar, and dimensions may be 0.
        file: the file that holds it.
        offset: of its first byte, from the start of the file.
        nbytes: its length; elements lie in row-major order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def open_regular(path: Path, *, writable: bool = False) -> tuple[int, int]:
    """Open ``path`` and return (file descriptor, size). A pipe, device or folder is refused, not waited on.

    Raises TensorFileError.
    """
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise TensorFileError(f"cannot open: {_reason(error)}", where=str(path)) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise TensorFileError("not a regular file", where=str(path))
    return fd, status.st_size


def pread_into(fd: int, offset: int, buffer: memoryview, *, where: str) -> None:
    """Fill ``buffer`` (writable bytes) from ``offset`` of the file. Raises TensorFileError at an early end of file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise TensorFileError(
                f"the file ends at byte {offset + done}", where=where, fix="copy or download it again"
            )
        done += count


def read_whole(path: Path, *, limit: int) -> bytes:
    """Return all bytes of a small file. Raises TensorFileError when it is longer than ``limit`` or no regular file."""
    fd, size = open_regular(path)
    try:
        if size > limit:
            raise TensorFileError(f"{size} bytes are more than the {limit} that such a file may have", where=str(path))
        data = bytearray(size)
        pread_into(fd, 0, memoryview(data), where=str(path))
    finally:
        os.close(fd)
    return bytes(data)


class OpenFiles:
    """File descriptors of the shards in use, at most ``MAX_OPEN_FILES`` at once, closed together."""

    def __init__(self, *, writable: bool = False) -> None:
        self._writable = writable
        self._open: OrderedDict[Path, int] = OrderedDict()

    def descriptor(self, path: Path) -> int:
        """Return a descriptor for ``path``; it stays valid until many other files were asked for."""
        fd = self._open.get(path)
        if fd is None:
            fd, _ = open_regular(path, writable=self._writable)
            self._open[path] = fd
            if len(self._open) > MAX_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(path)
        return fd

    def read_at(self, path: Path, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset`` of ``path``. Raises TensorFileError."""
        pread_into(self.descriptor(path), offset, buffer, where=str(path))

    def read_into(self, entry: TensorEntry, buffer: memoryview, start: int = 0) -> None:
        """Fill ``buffer`` with the bytes of ``entry`` from its byte ``start`` on. Raises TensorFileError."""
        assert start >= 0 and start + len(buffer) <= entry.nbytes
        pread_into(
            self.descriptor(entry.file), entry.offset + start, buffer, where=f"{entry.file}: tensor {entry.name!r}"
        )

    def close(self) -> None:
        """Close every descriptor; the object can be used again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def inside_folder(folder: Path, name: str) -> Path | None:
    """Return the file called ``name`` of ``folder``, or None when a hostile name or a link would lead out of it."""
    relative = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or relative.is_absolute() or ".." in relative.parts:
        return None
    path = folder / name
    return None if leaves_folder(path, folder) else path


def leaves_folder(path: Path, folder: Path) -> bool:
    """Whether ``path``, with links followed, lies outside ``folder``.

    The hub's cache is no escape: a snapshot's files are links into the ``blobs`` folder beside ``snapshots``.
    """
    try:
        path.exists()
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, an over-long name, a NUL byte
        return True
    if real.is_relative_to(home):
        return False
    return not (home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs")


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
