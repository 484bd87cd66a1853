"""Where a command may put a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rlctl.errors import UsageError


def require_place(path: Path | None, where: str) -> None:
    """Raise UsageError when no file can be written at ``path``: before the bench, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{path} is a folder", where=where)
    if path.exists() and not path.is_file():  # a file would take its place: /dev/null's, as root
        raise UsageError(f"{path} is no regular file", where=where)
    if path.is_symlink():
        raise UsageError(f"{path} is a link, which a file would take the place of", where=where)
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", where=where)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()  # permissions say nothing of a read-only file system
    except OSError as error:
        raise UsageError(f"nothing can be written in {path.parent}: {error.strerror}", where=where) from error
