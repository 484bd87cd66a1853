"""Reading what a run recorded. Nothing in it is executed, sizes are bounded, and every fault is told by its file."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load

from rlctl.experience.event_log import MOST_LINE, EventFile, read_events
from rlctl.experience.figures import figures_in
from rlctl.experience.records.columns import ColumnError, RoundRows, SegmentSpan, from_columns
from rlctl.experience.records.errors import AbsentError, RecordError
from rlctl.experience.records.lock import under_way
from rlctl.experience.records.manifest import (
    BATCH,
    CONFIGS,
    END,
    MANIFEST,
    PINS,
    RECORDS,
    SCHEMAS,
    SUMS,
    EventRange,
    GroupInfo,
    Manifest,
    Pin,
    recorded_steps,
    step_folder,
)
from rlctl.experience.rows import Row
from rlctl.keys.tensor_file import TensorFileError, open_regular

MOST_JSON = 64 << 20
MOST_BATCH = 8 << 30
_CHECKPOINT = re.compile(r"^step_(\d+)$")


@dataclass(frozen=True)
class Fault:
    """Something in a run folder that cannot be used; the rest can."""

    file: Path
    what: str


@dataclass
class RecordedRun:
    """What there is of a recorded run.

    Attributes:
        folder: of the run.
        config: ``config.json`` as the last attempt wrote it.
        events: of ``events.jsonl``; empty where there is none.
        steps: that have a record, in order.
        checkpoints: steps after which there is a checkpoint, in order.
        pinned: steps that were kept because something was odd about them.
        end: lines of the event log behind the last recorded step, where the run came to its end.
        faults: what could not be read.
        under_way: a process is writing to the folder: there may be more by now, and what leaves the window goes.
    """

    folder: Path
    config: Mapping[str, Any]
    events: EventFile = field(default_factory=EventFile)
    steps: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    pinned: dict[int, Pin] = field(default_factory=dict)
    end: EventRange | None = None
    faults: list[Fault] = field(default_factory=list)
    under_way: bool = False


@dataclass(frozen=True)
class Round:
    """A local update of a recorded step.

    Attributes:
        rows, task_rewards, scores, cut, segments: see ``RoundRows``.
        groups: that were selected for it.
        mini_batches: row indexes of each optimizer step, in order.
        micro_batches: of each optimizer step, each rank's passes, as row indexes; empty where none were noted.
        metrics: of its stages.
        kl_coef, kl_coef_after: weight of the KL before and after it.
    """

    rows: Sequence[Row]
    task_rewards: Sequence[float]
    scores: npt.NDArray[np.float64] | None
    cut: Sequence[bool]
    segments: Sequence[Sequence[SegmentSpan]]
    groups: Sequence[GroupInfo]
    mini_batches: Sequence[Sequence[int]]
    micro_batches: Sequence[Sequence[Sequence[Sequence[int]]]]
    metrics: Mapping[str, float]
    kl_coef: float
    kl_coef_after: float


@dataclass(frozen=True)
class Bundle:
    """A recorded step; ``config`` is the document that it was trained under."""

    folder: Path
    manifest: Manifest
    config: Mapping[str, Any]
    rounds: Sequence[Round]

    @property
    def metrics(self) -> dict[str, float]:
        """Return the figures of the step."""
        return figures_in(self.manifest.metrics)


def read_run(folder: Path) -> RecordedRun:
    """Read what a run folder holds; what cannot be read is among the faults, and the rest is used.

    Raises:
        RecordError: not the folder of a run.
    """
    if not (folder / "config.json").is_file():
        raise RecordError(folder, "not a run folder: it has no config.json")
    run, records = RecordedRun(folder, {}, under_way=under_way(folder)), folder / RECORDS
    try:
        run.config = _typed(folder / "config.json", dict[str, Any])
    except RecordError as error:
        run.faults.append(Fault(error.file, error.what))
    run.steps = recorded_steps(records)
    checkpoints = folder / "ckpt"
    if checkpoints.is_dir():
        run.checkpoints = sorted(int(m.group(1)) for p in checkpoints.iterdir() if (m := _CHECKPOINT.match(p.name)))
    try:
        run.pinned = {pin.step: pin for pin in read_pins(records / PINS)}
        if (records / END).exists():
            run.end = _typed(records / END, EventRange)
    except RecordError as error:
        run.faults.append(Fault(error.file, error.what))
    # After the records: a record is written when the log has the events that it stands on.
    if (folder / "events.jsonl").is_file():
        run.events = read_events(folder / "events.jsonl")
        if run.under_way and run.events.cut:
            run.events.faults.pop()  # its end is not written yet
        run.faults += [Fault(folder / "events.jsonl", f"line {number}: {what}") for number, what in run.events.faults]
        run.faults += [Fault(folder / "events.jsonl", what) for what in _misnumbered(run.events)]
    return run


def read_bundle(folder: Path, step: int) -> Bundle:
    """Read the record of one step of the run in ``folder``.

    Raises:
        AbsentError: there is none.
        RecordError: a file changed since it was written, or is not what a record holds.
    """
    records = folder / RECORDS
    place = step_folder(records, step)
    try:
        files = _verified(place)
    except RecordError as error:
        if place.is_dir():
            raise
        raise AbsentError(place, f"step {step} has no record") from error
    manifest = _decoded(place / MANIFEST, files[MANIFEST], Manifest)
    if manifest.schema not in SCHEMAS:
        known = " and ".join(map(str, SCHEMAS))
        raise RecordError(place / MANIFEST, f"schema {manifest.schema}, this rlctl reads {known}")
    if manifest.step != step:
        raise RecordError(place / MANIFEST, f"it is the record of step {manifest.step}, not of step {step}")
    try:
        rounds = from_columns(load(files[BATCH]), manifest.replicas)
    except (SafetensorError, ColumnError, KeyError, ValueError) as error:
        raise RecordError(place / BATCH, str(error)) from error
    if len(rounds) != len(manifest.rounds):
        raise RecordError(place / BATCH, f"{len(rounds)} rounds, the manifest has {len(manifest.rounds)}")
    return Bundle(place, manifest, _config(records, manifest), _rounds(place / MANIFEST, manifest, rounds))


def read_pins(file: Path) -> list[Pin]:
    """Return the pinned steps; none where there is no list. Raises RecordError."""
    return _typed(file, list[Pin]) if file.exists() else []


def lines_sha256(events: Path, first: int, last: int) -> str:
    """Return the SHA-256 of lines ``first`` to ``last`` of an event file, counted from 0, both included."""
    digest = hashlib.sha256()
    for line in itertools.islice(bounded_lines(events), max(first, 0), max(last + 1, 0)):
        digest.update(line)
    return digest.hexdigest()


def bounded_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file until one is longer than any that a run writes. Raises OSError."""
    with file.open("rb") as opened:
        while (line := opened.readline(MOST_LINE + 1)) and len(line) <= MOST_LINE:
            yield line


def _verified(place: Path) -> dict[str, bytes]:
    """Return the bytes of a record's files, which are those that were written."""
    sums: dict[str, str] = {}
    *lines, rest = _bytes(place / SUMS, 4096).decode(errors="replace").split("\n")  # \v and its like end no line
    if rest:
        raise RecordError(place / SUMS, "its last line is cut")
    for line in lines:
        digest, _, name = line.partition("  ")
        if name in sums:
            raise RecordError(place / SUMS, f"{name} is named twice")
        sums[name] = digest
    if sums.keys() != {MANIFEST, BATCH}:
        raise RecordError(place / SUMS, f"it names {', '.join(sorted(sums)) or 'nothing'}, not {BATCH} and {MANIFEST}")
    files = {MANIFEST: _bytes(place / MANIFEST, MOST_JSON), BATCH: _bytes(place / BATCH, MOST_BATCH)}
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != sums[name]:
            raise RecordError(place / name, f"its bytes are not those that {SUMS} names")
    return files


def _config(records: Path, manifest: Manifest) -> Mapping[str, Any]:
    file = records / CONFIGS / f"{manifest.config_sha256}.json"
    data = _bytes(file, MOST_JSON)
    if hashlib.sha256(data).hexdigest() != manifest.config_sha256:
        raise RecordError(file, "its bytes are not those that its name says")
    found: Mapping[str, Any] = _decoded(file, data, dict[str, Any])
    return found


def _rounds(file: Path, manifest: Manifest, rounds: Sequence[RoundRows]) -> list[Round]:
    found = []
    for number, (info, one) in enumerate(zip(manifest.rounds, rounds, strict=True)):
        uncut = manifest.failure is not None and manifest.failure.round == number and not info.mini_batches
        if not uncut and sorted(i for batch in info.mini_batches for i in batch) != list(range(len(one.rows))):
            raise RecordError(file, f"round {number}: its mini batches are not its {len(one.rows)} rows, each once")
        ran = {i for batch in info.micro_batches for rank in batch for some in rank for i in some}
        if ran and not 0 <= min(ran) <= max(ran) < len(one.rows):
            raise RecordError(file, f"round {number}: its micro-batches name rows beyond its {len(one.rows)}")
        found.append(
            Round(
                rows=one.rows,
                task_rewards=one.task_rewards,
                scores=one.scores,
                cut=one.cut,
                segments=one.segments,
                groups=info.groups,
                mini_batches=info.mini_batches,
                micro_batches=info.micro_batches,
                metrics=figures_in(info.metrics),
                kl_coef=info.kl_coef,
                kl_coef_after=info.kl_coef_after,
            )
        )
    return found


def _misnumbered(found: EventFile) -> list[str]:
    """Return what is wrong with the numbers of events: each is that of its line, so that none is lost or doubled."""
    faults, unread = [], {number for number, _ in found.faults}
    number = 0
    for event in found.events:
        number += 1
        while number in unread:
            number += 1
        if event.seq != number - 1:
            faults.append(f"line {number}: event {event.seq} where {number - 1} belongs")
            break  # whatever follows is shifted by it
    return faults


def _typed(file: Path, kind: Any) -> Any:
    return _decoded(file, _bytes(file, MOST_JSON), kind)


def _decoded(file: Path, data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(file, str(error)) from error


def _bytes(file: Path, most: int) -> bytes:
    try:
        descriptor, size = open_regular(file)  # a pipe or a device would be waited on, or never end
        with os.fdopen(descriptor, "rb") as opened:
            if size > most:
                raise RecordError(file, f"{size} bytes, more than the {most} that such a file may have")
            return opened.read(size)
    except TensorFileError as error:
        raise RecordError(file, error.message) from error
    except OSError as error:
        raise RecordError(file, error.strerror or str(error)) from error
