"""Level R0: everything that was recorded is what was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.experience.events import RunStarted
from rlctl.experience.records.errors import AbsentError, RecordError
from rlctl.experience.records.manifest import END, Manifest
from rlctl.experience.records.reading import bounded_lines, lines_sha256
from rlctl.experience.records.sealing import broken_seals
from rlctl.replay.findings import Difference, Finding, absent
from rlctl.replay.run_source import RunSource, checkpoint_folder
from rlctl.runtime.checkpoints import read_checkpoint

Fault = tuple[Path, str]
"""A file and what is wrong with it."""


class Hashes:
    """Checks of a run folder.

    Args:
        source: the run.
    """

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._folder = source.run.folder
        self._attempt = max((e.attempt for e in source.run.events.events if isinstance(e, RunStarted)), default=0)
        self._metrics = _metrics_lines(self._folder / "metrics.jsonl")

    def finding(self, step: int) -> Finding:
        """Return whether the files that a step's record stands on are those that it names."""
        try:
            return _finding(step, list(self._of_step(step)))
        except AbsentError as error:
            return absent(step, "R0", error)

    def run_finding(self) -> Finding | None:
        """Return what is wrong with files that belong to no single step, as of step 0; None when nothing is."""
        faults = [(fault.file, fault.what) for fault in self._source.run.faults]
        faults += [*self._end(), *self._result(), *broken_seals(self._folder)]
        for step in self._source.checkpoints:
            try:
                read_checkpoint(checkpoint_folder(self._folder, step))
            except RlctlError as error:
                if not checkpoint_folder(self._folder, step).is_dir():
                    continue  # it was let go meanwhile
                faults.append((checkpoint_folder(self._folder, step), error.message))
        return _finding(0, faults) if faults else None

    def _of_step(self, step: int) -> Iterator[Fault]:
        try:
            bundle = self._source.bundle(step)
            manifest = bundle.manifest
        except AbsentError:
            raise
        except RecordError as error:
            yield error.file, error.what
            return
        events = self._folder / "events.jsonl"
        told = manifest.events
        if not events.is_file() or lines_sha256(events, told.first_seq, told.last_seq) != told.sha256:
            what = f"lines {told.first_seq + 1} to {told.last_seq + 1} are not those that step {step} was recorded with"
            yield events, what
        yield from self._configuration(manifest)
        yield from self._checkpoint(step)
        if manifest.failure is not None:
            return  # it has no metrics
        line = self._metrics.get(step)
        if line is None:
            yield self._folder / "metrics.jsonl", f"it has no line of step {step}"
        elif line != json.dumps({"step": step, **bundle.metrics}).encode():
            yield self._folder / "metrics.jsonl", f"its line of step {step} is not what was recorded"

    def _configuration(self, manifest: Manifest) -> Iterator[Fault]:
        """Compare config.json, which is that of the last attempt."""
        file = self._folder / "config.json"
        if manifest.attempt != self._attempt:
            return
        if hashlib.sha256(file.read_bytes()).hexdigest() == manifest.config_sha256:
            return
        bundle = self._source.bundle(manifest.step)
        keys = changed_keys(bundle.config.get("config", {}), self._source.run.config.get("config", {}))
        named = f": {', '.join(keys[:3])}" if keys else ""
        yield file, f"it is not the configuration that step {manifest.step} was trained under{named}"

    def _checkpoint(self, step: int) -> Iterator[Fault]:
        """Check the checkpoint that the way to a step begins at, where it is kept."""
        begin = max((c for c in self._source.checkpoints if c < step), default=None)
        if begin is None:
            return
        try:
            self._source.states(begin)
        except RecordError:
            return  # told of the step whose record it is
        except RlctlError as error:
            yield checkpoint_folder(self._folder, begin), error.message

    def _end(self) -> Iterator[Fault]:
        events, end = self._folder / "events.jsonl", self._source.run.end
        if end is None:
            return
        if not events.is_file() or lines_sha256(events, end.first_seq, end.last_seq) != end.sha256:
            yield events, f"lines {end.first_seq + 1} to {end.last_seq + 1} are not those of the end in {END}"
            return
        lines = sum(1 for _ in bounded_lines(events))
        if lines > end.last_seq + 1:
            yield events, f"{lines - end.last_seq - 1} lines follow the run's end"

    def _result(self) -> Iterator[Fault]:
        """Compare what the run says of its end with the record of its last step."""
        file = self._folder / "result.json"
        if not file.is_file():
            return
        try:
            result = json.loads(file.read_bytes())
            last = self._source.bundle(int(result["steps"])).manifest
            if result["params_digest"] != last.params_sha256:
                yield file, f"its params_digest is not that of step {last.step}"
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            yield file, f"not the result of a run: {error}"
        except RecordError:
            return  # told of the step whose record it is, or there is none


def changed_keys(told: Any, found: Any, path: str = "") -> list[str]:
    """Return the dotted keys in which two nested mappings differ."""
    if not isinstance(told, dict) or not isinstance(found, dict):
        return [] if told == found else [path]
    keys = [*told, *(key for key in found if key not in told)]
    return [
        name
        for key in keys
        for name in changed_keys(told.get(key), found.get(key), f"{path}.{key}" if path else str(key))
    ]


def _finding(step: int, faults: list[Fault]) -> Finding:
    if not faults:
        return Finding(step=step, level="R0", status="exact")
    reason = "; ".join(
        f"{file.name}: {'; '.join(what for _, what in of_file)}"
        for file, of_file in groupby(faults, key=lambda fault: fault[0])
    )
    where = Difference("record", str(faults[0][0]))
    return Finding(step=step, level="R0", status="differs", reason=reason, first_difference=where)


def _metrics_lines(file: Path) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for line in bounded_lines(file) if file.is_file() else ():
        try:
            found[int(json.loads(line)["step"])] = line.removesuffix(b"\n")
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            continue  # the step whose line it was has none
    return found
