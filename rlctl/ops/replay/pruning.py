"""Letting go of records and checkpoints that a run keeps beyond its window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.records.errors import RecordError
from rlctl.experience.records.lock import LOCK, take
from rlctl.experience.records.manifest import CONFIGS, RECORDS
from rlctl.experience.records.window import Window, discarded
from rlctl.experience.records.writing import clean, discard
from rlctl.ops.replay.history import CHECKPOINTS, History, read_history, size_of


@dataclass(frozen=True)
class Pruned:
    """What went, or would go.

    Attributes:
        window: steps that stay, the last ones; 0: all.
        records, checkpoints: steps of those that go.
        configs: configurations that no record names any more.
        nbytes: of all of it.
    """

    window: int
    records: list[int]
    checkpoints: list[int]
    configs: list[str]
    nbytes: int


def prune(history: History, keep: int | None, *, dry_run: bool) -> Pruned:
    """Keep the last ``keep`` recorded steps (None: ``run.record_window``) with the checkpoints that lead to them, what
    is pinned, and the checkpoints that ``run.keep_checkpoints`` names; the rest goes.

    Raises:
        UsageError: the run is under way.
        RlctlError: the folder cannot be written.
        OSError: something cannot be removed.
    """
    if dry_run:
        return _beyond(history, keep)
    with _alone(history.path):
        history = read_history(history.path)  # as it is now that nobody else changes it
        found = _beyond(history, keep)
        clean(history.path / RECORDS)
        _clean_checkpoints(history.path / CHECKPOINTS)
        for step in found.records:
            discard(history.record_folder(step))
        for step in found.checkpoints:
            # Renamed first: a kill in between leaves no checkpoint with files missing.
            doomed = history.checkpoint_folder(step).with_name(f".step_{step}.pruned.old")
            history.checkpoint_folder(step).rename(doomed)
            shutil.rmtree(doomed)
        for name in found.configs:
            (history.path / RECORDS / CONFIGS / name).unlink()
    return found


def _beyond(history: History, keep: int | None) -> Pruned:
    """Return what goes."""
    run = history.resolved.config.run
    window = Window(run.record_window if keep is None else keep, run.checkpoint_every)
    pins = list(history.pinned.values())
    last = max([*history.recorded, *history.steps], default=0)
    records = discarded(history.recorded, window.first(last, history.checkpoints), pins)
    needed = {*window.needed(last, history.checkpoints), *(pin.checkpoint for pin in pins)}
    needed |= set(history.checkpoints[-run.keep_checkpoints :])
    # Without records there is nothing that an old checkpoint leads to; how many stay is the trainer's business.
    checkpoints = [step for step in history.checkpoints if step not in needed] if history.recorded else []
    configs = _unused_configs(history, set(records))
    folders = [*map(history.record_folder, records), *map(history.checkpoint_folder, checkpoints)]
    size = sum(map(size_of, [*folders, *configs]))
    return Pruned(window.steps, records, checkpoints, [path.name for path in configs], size)


def _clean_checkpoints(folder: Path) -> None:
    """Remove what a killed process left half-written or half-deleted."""
    for leftover in folder.glob(".step_*"):
        shutil.rmtree(leftover)


def _unused_configs(history: History, going: set[int]) -> list[Path]:
    """Return the configurations that only records name that go; none where a record that stays cannot be read."""
    folder = history.path / RECORDS / CONFIGS
    named = set()
    try:
        for step in history.recorded:
            if step not in going and (bundle := history.bundle(step)) is not None:
                named.add(f"{bundle.manifest.config_sha256}.json")
    except RecordError:
        return []  # what it names cannot be told: nothing is taken from it
    return [path for path in sorted(folder.glob("*.json")) if path.name not in named]


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Hold the run folder's lock, which a run under way holds."""
    try:
        lock = (run / LOCK).open("ab")
    except OSError as error:
        raise RlctlError(f"the run cannot be pruned: {error.strerror}", where=str(run)) from error
    with lock:
        try:
            take(lock)
        except OSError as error:
            raise UsageError(
                f"{run} is in use by another process", where="RUN", fix="prune it when it is done"
            ) from error
        yield
