"""A run's folder as its past: configuration, events, and what is kept of each step. Nothing in it is executed."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlctl.config import Resolved, from_json
from rlctl.errors import UsageError
from rlctl.experience.event_log import lineage
from rlctl.experience.events import Event, RunStarted
from rlctl.experience.records.errors import AbsentError, RecordError
from rlctl.experience.records.manifest import RECORDS, Failure, Pin, step_folder
from rlctl.experience.records.reading import Bundle, Fault, read_bundle, read_run
from rlctl.ops.replay.steps import TrainedStep, begun_steps

CHECKPOINTS = "ckpt"


@dataclass(frozen=True)
class History:
    """What a run's folder tells.

    Attributes:
        path: the folder.
        resolved: its configuration, the last attempt's.
        all_events: of every attempt, also of work that was lost and done again.
        faults: what could not be read.
        recorded: steps that have a record.
        checkpoints: steps that have a checkpoint.
        pinned: steps that are kept beyond the window, and why.
        under_way: a process trains in it, or prunes it.
    """

    path: Path
    resolved: Resolved
    all_events: Sequence[Event]
    faults: Sequence[Fault]
    recorded: Sequence[int]
    checkpoints: Sequence[int]
    pinned: Mapping[int, Pin]
    under_way: bool = False

    @cached_property
    def events(self) -> list[Event]:
        """Those that led to the final weights, in order."""
        return list(lineage(list(self.all_events)))

    @cached_property
    def begun(self) -> dict[int, TrainedStep]:
        """The steps that began, as the events tell them; the last may have no end."""
        return begun_steps(self.events)

    @cached_property
    def steps(self) -> dict[int, TrainedStep]:
        """The steps that ended, as the events tell them."""
        return {number: step for number, step in self.begun.items() if step.version is not None}

    @cached_property
    def failed(self) -> dict[int, Failure]:
        """Why steps failed: as their records tell, or else the events."""
        found = {number: step.failure for number, step in self.begun.items() if step.failure is not None}
        for number in {*self.recorded} - {*self.steps}:
            with suppress(RecordError):  # whoever shows the step says so
                bundle = self.bundle(number)
                if bundle is not None and bundle.manifest.failure is not None:
                    found[number] = bundle.manifest.failure
        return found

    @property
    def told(self) -> list[int]:
        """Steps that can be shown: they ended or failed."""
        return sorted({*self.steps, *self.failed, *self.recorded})

    @property
    def known(self) -> list[int]:
        """Every step that anything is kept of."""
        return sorted({*self.begun, *self.checkpoints, *self.recorded})

    @property
    def attempts(self) -> list[RunStarted]:
        """Each start of the run."""
        return [event for event in self.all_events if isinstance(event, RunStarted)]

    @property
    def mode(self) -> str:
        """Trainer mode of the last attempt."""
        return self.resolved.config.trainer.mode

    def bundle(self, step: int) -> Bundle | None:
        """Return the record of a step, None where there is none, or none any more. Raises RecordError when it is not
        whole."""
        try:
            return read_bundle(self.path, step) if step in self.recorded else None
        except AbsentError:
            return None

    def checkpoint_folder(self, step: int) -> Path:
        """Return where a step's checkpoint is."""
        return self.path / CHECKPOINTS / f"step_{step}"

    def record_folder(self, step: int) -> Path:
        """Return where a step's record is."""
        return step_folder(self.path / RECORDS, step)


def read_history(path: Path, *, where: str = "RUN") -> History:
    """Read a run's folder.

    Raises:
        UsageError: it is not one, or its configuration cannot be used.
        RecordError: its configuration cannot be read.
    """
    try:
        there = (path / "config.json").is_file()
        what = "has no config.json" if path.is_dir() else "is not a folder" if path.exists() else "does not exist"
    except OSError as error:  # an over-long name, a folder that may not be looked into
        there, what = False, f"cannot be read: {error.strerror or error}"
    if not there:
        raise UsageError(
            f"{path} is no run folder: it {what}", where=where, fix="give the folder that rlctl train made"
        )
    run = read_run(path)
    resolved = from_json(run.config, str(path / "config.json"))
    return History(
        path, resolved, run.events.events, run.faults, run.steps, run.checkpoints, run.pinned,
        run.under_way,
    )  # fmt: skip


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; links are not followed. 0 where there is nothing, or
    nothing any more."""
    try:
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode):
            return sum(size_of(item) for item in path.iterdir())
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
