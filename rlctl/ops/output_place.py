"""Where a command may put a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

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
