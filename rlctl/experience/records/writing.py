"""Writing a step's record so that a reader never meets half of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rlctl.experience.records.columns import Columns
from rlctl.experience.records.encoding import encode
from rlctl.experience.records.manifest import BATCH, CONFIGS, MANIFEST, SUMS, Manifest, Pin, step_folder


def write_bundle(records: Path, manifest: Manifest, columns: Columns) -> Path:
    """Publish a step's record by one rename, in place of an earlier one, and return its folder.

    A process that is killed leaves a whole record or none. Against a loss of power it stands after ``settle``.

    Raises:
        OSError: the disk is full or read-only; nothing half-written is left.
    """
    target = step_folder(records, manifest.step)
    temporary = records / f".{target.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        files = {BATCH: encode(columns), MANIFEST: msgspec.json.format(msgspec.json.encode(manifest), indent=1)}
        lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
        for name, data in {**files, SUMS: "".join(lines).encode()}.items():
            _write(temporary / name, data)
        if target.exists():
            discard(target)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def settle(folders: Iterable[Path]) -> None:
    """Have records survive a loss of power, those that are still there. Raises OSError."""
    parents = set()
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # it left the window meanwhile
            for path in (*(folder / name for name in (BATCH, MANIFEST, SUMS)), folder):
                _sync(path)
            parents.add(folder.parent)
    for parent in parents:
        _sync(parent)


def write_config(records: Path, document: bytes) -> str:
    """Keep a configuration under its SHA-256, which is returned. Raises OSError."""
    name = hashlib.sha256(document).hexdigest()
    target = records / CONFIGS / f"{name}.json"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        replace(target, document)
    return name


def write_pins(file: Path, pins: list[Pin]) -> None:
    """Replace the list of pinned steps. Raises OSError."""
    replace(file, msgspec.json.format(msgspec.json.encode(pins), indent=1))


def discard(folder: Path) -> None:
    """Remove a record: renamed first, so that a kill in between leaves none with files missing. Raises OSError."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.rename(doomed)
    with contextlib.suppress(OSError):  # what is left has a dot name: it is no record, and goes with the next start
        for path in doomed.iterdir():
            path.unlink()
        doomed.rmdir()


def clean(records: Path) -> None:
    """Remove what a killed process left half-written or half-deleted."""
    if records.is_dir():
        for leftover in records.glob(".*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def replace(path: Path, data: bytes) -> None:
    """Replace a file in one step, which survives a loss of power. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(temporary, data)
        _sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
