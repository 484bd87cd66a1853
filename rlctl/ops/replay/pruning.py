"""Letting go of records and checkpoints that a run keeps beyond its window."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import UsageError
from rlctl.experience.records.errors import RecordError
from rlctl.experience.records.manifest import CONFIGS, RECORDS
from rlctl.experience.records.window import Window, discarded
from rlctl.experience.records.writing import clean, discard
from rlctl.ops.replay.history import History, size_of


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
        OSError: something cannot be removed.
    """
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
    found = Pruned(
        window.steps, records, checkpoints, [p.name for p in configs], sum(map(size_of, [*folders, *configs]))
    )
    if dry_run:
        return found
    with _alone(history.path):
        clean(history.path / RECORDS)
        for step in records:
            discard(history.record_folder(step))
        for step in checkpoints:
            # Renamed first: a kill in between leaves no checkpoint with files missing.
            doomed = history.checkpoint_folder(step).with_name(f".step_{step}.pruned.old")
            history.checkpoint_folder(step).rename(doomed)
            shutil.rmtree(doomed)
        for path in configs:
            path.unlink()
    return found


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
    with (run / ".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(
                f"{run} is in use by another process", where="RUN", fix="prune it when it is done"
            ) from error
        yield
