"""Writing so that a reader, or the next start, never meets half a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step, on disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace ``path`` by a JSON document in one step."""
    write_bytes(path, (json.dumps(document, indent=2, sort_keys=True, allow_nan=True) + "\n").encode())
