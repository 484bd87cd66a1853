"""Where a command may put a file, and how the file comes to be there."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rlctl.errors import UsageError


def require_place(path: Path | None, where: str) -> None:
    """Raise UsageError when no file can be written at ``path``: before the bench, not after it."""
    if path is None:
        return
    try:
        what = _in_the_way(path)
    except OSError as error:  # an over-long name
        raise UsageError(f"{path} cannot be written: {error.strerror}", where=where) from error
    if what:
        raise UsageError(what, where=where)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()  # permissions say nothing of a read-only file system
    except OSError as error:
        raise UsageError(f"nothing can be written in {path.parent}: {error.strerror}", where=where) from error


def _in_the_way(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder"
    if path.exists() and not path.is_file():  # a file would take its place: /dev/null's, as root
        return f"{path} is no regular file"
    if path.is_symlink():
        return f"{path} is a link, which a file would take the place of"
    return "" if path.parent.is_dir() else f"there is no folder {path.parent}"


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that becomes ``path``, in place of one that is there, when the block ends without an error.

    Until then it has no name, where the file system can do that: a process that is killed leaves nothing behind.

    Raises:
        OSError: it cannot be written.
    """
    name = path.with_name(f".{secrets.token_hex(8)}.tmp")  # short, whatever the length of the other
    try:
        handle = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
        nameless = True
    except OSError:
        handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        nameless = False
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            if nameless:
                # Python follows the link to the file, as it is told, only when it is given a folder's number too.
                os.link(f"/proc/self/fd/{handle}", name, src_dir_fd=handle, follow_symlinks=True)
            name.replace(path)
    finally:
        with suppress(FileNotFoundError):
            name.unlink()
