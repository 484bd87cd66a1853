"""A run folder as what a replay reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlctl.config import from_json
from rlctl.errors import RlctlError, UsageError
from rlctl.experience.records.errors import AbsentError, RecordError
from rlctl.experience.records.manifest import CONFIGS, RECORDS
from rlctl.experience.records.reading import Bundle, RecordedRun, read_bundle, read_run
from rlctl.replay.step_record import StepRecord
from rlctl.runtime.checkpoints import read_checkpoint
from rlctl.runtime.cluster.supported import needs_processes
from rlctl.schema import Config
from rlctl.schema.running import MOST_THREADS

_HELD = 4
"""So many steps' records are held at once: the way through a run comes back to the last few."""


class RunSource:
    """A ``Source``: records and checkpoints of a run folder, which is only read.

    Attributes:
        run: what was found in the folder.

    Raises:
        RecordError: not the folder of a run.
        UsageError: the run recorded no steps.
    """

    def __init__(self, folder: Path) -> None:
        self.run: RecordedRun = read_run(folder)
        if not self.run.steps:
            raise UsageError(
                f"{folder} holds no record of a step",
                where=str(folder / RECORDS),
                fix="train with run.record=batches, which keeps what each step was trained on",
            )
        self.bundle = lru_cache(_HELD)(self._bundle)

    @property
    def steps(self) -> Sequence[int]:
        """See Source."""
        return self.run.steps

    @property
    def checkpoints(self) -> Sequence[int]:
        """See Source."""
        return self.run.checkpoints

    def step(self, number: int) -> StepRecord:
        """See Source."""
        bundle = self.bundle(number)
        manifest = bundle.manifest
        return StepRecord(
            step=number,
            config=_config(bundle),
            rounds=bundle.rounds,
            params_digest=manifest.params_sha256,
            critic_digest=manifest.critic_sha256,
            fingerprint=manifest.fingerprint,
            total_steps=manifest.total_steps,
            failure=manifest.failure,
        )

    def states(self, number: int) -> Mapping[str, Any]:
        """See Source."""
        folder = checkpoint_folder(self.run.folder, number)
        try:
            step, states = read_checkpoint(folder)
            digest = tensors_sha256(folder)
        except RlctlError as error:
            if folder.is_dir():
                raise
            raise AbsentError(folder, f"the checkpoint of step {number} is gone") from error
        if step != number:
            raise RlctlError(f"it is the checkpoint of step {step}", where=str(folder))
        for later in (step for step in self.steps if step > number):
            try:
                told = self.bundle(later).manifest.checkpoint
            except AbsentError:
                continue
            if told is not None and told.name == folder.name and told.tensors_sha256 != digest:
                raise RlctlError(f"it is not the checkpoint that step {later} was recorded after", where=str(folder))
            break
        return states

    def _bundle(self, number: int) -> Bundle:
        return read_bundle(self.run.folder, number)


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the folder of a checkpoint."""
    return run / "ckpt" / f"step_{step}"


def tensors_sha256(folder: Path) -> str:
    """Return the digest that a checkpoint states of its tensors. Raises RlctlError."""
    try:
        return str(json.loads((folder / "state.json").read_text())["tensors_sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RlctlError(f"not a checkpoint that can be read: {error}", where=str(folder)) from error


def _config(bundle: Bundle) -> Config:
    """Return the configuration of a step. Threads that were left to the machine are those that it had then."""
    manifest = bundle.manifest
    file = bundle.folder.parent / CONFIGS / f"{manifest.config_sha256}.json"
    try:
        config = from_json(bundle.config, str(file)).config
    except UsageError as error:
        raise RecordError(file, error.message) from error
    threads = manifest.fingerprint.get("threads")
    if not config.run.threads and isinstance(threads, int) and 0 < threads <= MOST_THREADS and in_one_process(config):
        config.run.threads = threads
    return config


def in_one_process(config: Config) -> bool:
    """Whether a run's own process did all that it computed."""
    return not needs_processes(config) and config.model.engine != "fsdp2"
