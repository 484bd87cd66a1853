"""The folder of a run: one owner at a time, every file either whole or appended to."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.records.lock import LOCK, take
from rlctl.runtime.atomic import write_bytes, write_json

_OWN = ("config.json", "env.json", "metrics.jsonl", "events.jsonl", "result.json", "reward.png")
_OWN_FOLDERS = ("logs", "ckpt", "final", "trackers", "records")


class RunDirectory:
    """Holds the lock of a run folder from ``open`` to ``close``.

    Files: config.json, env.json, metrics.jsonl, events.jsonl, logs/attempt_N.log, ckpt/step_N/, final/, records/,
    result.json, trackers/.
    """

    def __init__(self, path: Path, lock: BinaryIO, attempt: int, *, created: bool) -> None:
        self.path = path
        self._created = created
        self.attempt = attempt
        self._lock = lock
        self._log_handler: logging.Handler | None = None
        self._metrics: BinaryIO | None = None

    @classmethod
    def open(cls, path: Path, *, resume: bool, overwrite: bool = False, fresh: bool = False) -> RunDirectory:
        """Create or take over a run folder.

        Args:
            path: the folder.
            resume: go on with what is there; otherwise a folder with content is refused.
            overwrite: clear an earlier run first; never clears a folder that is not a run.
            fresh: make a folder that nobody has, with a number behind the name where ``path`` is taken by now.

        Raises:
            UsageError: in use, not empty, or not a run folder.
            RlctlError: it cannot be written.
        """
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file", where="--run-dir", fix="give a folder")
        created = not path.exists()
        try:
            if fresh:
                path, created = _make_new(path), True
            elif created:
                path.mkdir(parents=True, exist_ok=True)
            elif not (path / LOCK).exists():
                _check_content(path, resume=resume, overwrite=overwrite)  # a folder that is refused gets no lock file
            lock = (path / LOCK).open("ab")
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            take(lock)
        except OSError as error:
            lock.close()
            raise UsageError(
                f"run directory {path} is in use by another process",
                where="--run-dir",
                fix="wait for it, or give another",
            ) from error
        try:
            _check_content(path, resume=resume, overwrite=overwrite)
            if overwrite:
                _clear(path)
            (path / "logs").mkdir(exist_ok=True)
            attempt = 1 + max((_attempt_of(p) for p in (path / "logs").glob("attempt_*.log")), default=-1)
            (path / "logs" / f"attempt_{attempt}.log").touch()
        except OSError as error:
            lock.close()
            raise _unwritable(path, error) from error
        except RlctlError:
            lock.close()
            raise
        return cls(path, lock, attempt, created=created)

    def start_log(self) -> None:
        """Copy log records of this process to logs/attempt_N.log; logs/latest points to it."""
        name = f"attempt_{self.attempt}.log"
        self._log_handler = logging.FileHandler(self.path / "logs" / name)
        self._log_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self._log_handler)
        latest = self.path / "logs" / f".latest.{os.getpid()}"
        latest.unlink(missing_ok=True)
        latest.symlink_to(name)
        latest.replace(self.path / "logs" / "latest")

    def write_document(self, name: str, document: Mapping[str, Any]) -> None:
        """Replace a JSON file of the run in one step."""
        write_json(self.path / name, document)

    def read_document(self, name: str) -> dict[str, Any] | None:
        """Return a JSON file of the run, or None when it is not there."""
        file = self.path / name
        return json.loads(file.read_text()) if file.exists() else None

    def start_metrics(self, *, from_step: int) -> None:
        """Open metrics.jsonl, keeping the lines up to ``from_step``: a step done again has one line, not two."""
        file = self.path / "metrics.jsonl"
        if file.exists():
            kept = [line for line in file.read_bytes().splitlines() if _step_of(line) <= from_step]
            write_bytes(file, b"".join(line + b"\n" for line in kept))
        self._metrics = file.open("ab")

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl and hand it to the operating system."""
        assert self._metrics is not None, "start_metrics first"
        self._metrics.write(json.dumps(metrics).encode() + b"\n")
        self._metrics.flush()

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []

    def discard(self) -> None:
        """Close, and remove the folder if this attempt made it: a run that never began leaves nothing behind."""
        self.close()
        if self._created:
            shutil.rmtree(self.path)

    def close(self) -> None:
        """Stop the log and release the lock. Harmless when repeated."""
        if self._log_handler is not None:
            logging.getLogger().removeHandler(self._log_handler)
            self._log_handler.close()
            self._log_handler = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._lock.close()


def new_run_path(root: Path, name: str) -> Path:
    """Return a folder name under ``root`` that is not taken: date, time, name."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    candidate, number = root / stem, 1
    while candidate.exists():
        number += 1
        candidate = root / f"{stem}-{number}"
    return candidate


def _make_new(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    candidate, number = path, 1
    while True:
        try:
            candidate.mkdir()
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
        else:
            return candidate


def _check_content(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise UsageError when what the folder holds rules out running in it."""
    content = _content(path)
    if content and not resume and not overwrite:
        raise UsageError(
            f"run directory {path} is not empty",
            where="--run-dir",
            fix="continue it with --resume auto, replace it with --overwrite, or give another folder",
        )
    foreign = [p.name for p in content if p.name not in (*_OWN, *_OWN_FOLDERS)]
    began = (path / "config.json").exists()
    if resume and not began:
        # A kill may come before config.json is there, and leave its temporary file.
        foreign = [name for name in foreign if not name.startswith(".")]
        if foreign:
            raise UsageError(
                f"{path} is not a run directory (holds {foreign[0]})",
                where="--resume",
                fix="give the folder of a run, or a new or empty one",
            )
    if overwrite and content and (foreign or not began):
        what = f"holds {foreign[0]}" if foreign else "has no config.json"
        raise UsageError(f"{path} is not a run directory ({what}); it is not overwritten", where="--overwrite")


def _content(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.name != ".lock")


def _clear(path: Path) -> None:
    for item in _content(path):
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()


def _unwritable(path: Path, error: OSError) -> RlctlError:
    return RlctlError(
        f"run directory {path} cannot be written: {error.strerror or error}",
        where="--run-dir",
        fix="give another folder",
    )


def _attempt_of(path: Path) -> int:
    number = path.stem.removeprefix("attempt_")
    return int(number) if number.isdigit() else -1


def _step_of(line: bytes) -> float:
    """Return the step of a metrics line; a line that was cut by a kill belongs to no step that is kept."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
