"""Writing a step's record so that a reader never meets half of it."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
from safetensors.numpy import save

from rlctl.experience.records.columns import Columns
from rlctl.experience.records.manifest import BATCH, CONFIGS, MANIFEST, SUMS, Manifest, Pin, step_folder


def write_bundle(records: Path, manifest: Manifest, columns: Columns) -> Path:
    """Publish a step's record by one rename, in place of an earlier one, and return its folder.

    Raises:
        OSError: the disk is full or read-only; nothing half-written is left.
    """
    target = step_folder(records, manifest.step)
    temporary = records / f".{target.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        files = {BATCH: save(columns), MANIFEST: msgspec.json.format(msgspec.json.encode(manifest), indent=1)}
        lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
        for name, data in {**files, SUMS: "".join(lines).encode()}.items():
            _write(temporary / name, data)
        _sync_folder(temporary)
        if target.exists():
            discard(target)
        temporary.rename(target)
        _sync_folder(records)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


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
    shutil.rmtree(doomed, ignore_errors=True)


def clean(records: Path) -> None:
    """Remove what a killed process left half-written or half-deleted."""
    if records.is_dir():
        for leftover in records.glob(".*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def replace(path: Path, data: bytes) -> None:
    """Replace a file in one step. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _write(path: Path, data: Any) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
