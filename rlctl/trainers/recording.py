"""The recorder of a run: sees each step at its end and has its record written, away from the step's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

import rlctl
from rlctl.errors import RlctlError
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, Evicted, Noted, Selected, Switched
from rlctl.experience.figures import figures_out
from rlctl.experience.records.background import Background
from rlctl.experience.records.bands import Bands
from rlctl.experience.records.columns import RoundRows, to_columns
from rlctl.experience.records.errors import RecordError
from rlctl.experience.records.manifest import (
    END,
    PINS,
    SCHEMA,
    CheckpointRef,
    EventRange,
    Failure,
    Manifest,
    Pin,
    RoundInfo,
    recorded_steps,
    step_folder,
    words_of,
)
from rlctl.experience.records.reading import read_pins
from rlctl.experience.records.sealing import seal, unseal
from rlctl.experience.records.window import Window, discarded
from rlctl.experience.records.writing import (
    clean,
    discard,
    replace,
    settle,
    write_bundle,
    write_config,
    write_pins,
)
from rlctl.model.base import ModelEngine
from rlctl.model.critic.base import Critic
from rlctl.runtime.checkpoints import Checkpoints
from rlctl.trainers.recorded_round import recorded_round
from rlctl.trainers.state_digests import state_digests
from rlctl.trainers.step import STAGES, StepState

_DECIDED = (Selected, Evicted, Switched)


@dataclass(frozen=True)
class Circumstances:
    """What is the same for every step of an attempt; see ``Manifest``."""

    mode: str
    attempt: int
    total_steps: int
    config: bytes
    fingerprint: Mapping[str, Any]
    layout: Mapping[str, Any]


class Recorder:
    """Records steps under ``records/`` of a run folder.

    A record that cannot be written, as on a full disk, is told and left out; the run goes on, and later steps are
    tried again. What was half-written is removed.

    Args:
        records: the folder.
        circumstances: of this attempt.
        events: of the run.
        checkpoints: of the run; those that records stand on are kept from now on.
        window: which records are kept.
        bands: that a figure must leave for a step to be pinned.
        most_pins: how many steps are pinned at once, the latest.
        full: whether to have a digest of every parameter and optimizer moment.
    """

    def __init__(
        self,
        records: Path,
        circumstances: Circumstances,
        events: EventLog,
        checkpoints: Checkpoints,
        *,
        window: Window,
        bands: Bands,
        most_pins: int,
        full: bool,
    ) -> None:
        self._records = records
        self._told = circumstances
        self._events = events
        self._checkpoints = checkpoints
        self._window = window
        self._bands = bands
        self._most_pins = most_pins
        self._full = full
        self._step = 0
        self._config_sha256 = ""
        self._pins: list[Pin] = []
        self._rounds: list[tuple[RoundRows, RoundInfo]] = []
        self._decisions: list[dict[str, Any]] = []
        self._tensors: dict[int, str] = {}
        self._unsettled: list[Path] = []
        self._standing: list[int] | None = None  # the checkpoints that there are, once looked at
        self._kl_coef = 0.0
        self._background = Background("rlctl-records")
        checkpoints.needed = self._needed
        events.subscribe(self._heard)

    def begin(self, step: int) -> None:
        """Go on after ``step``: what an earlier attempt recorded beyond it was lost with that attempt.

        Raises:
            RlctlError: the records cannot be written.
        """
        self._step = step
        try:
            self._records.mkdir(parents=True, exist_ok=True)
            clean(self._records)
            self._config_sha256 = write_config(self._records, self._told.config)
            for lost in recorded_steps(self._records):
                if lost > step:
                    discard(step_folder(self._records, lost))
            (self._records / END).unlink(missing_ok=True)
            unseal(self._records.parent)
            self._pins = [pin for pin in self._read_pins() if pin.step <= step]
            write_pins(self._records / PINS, self._pins)
        except OSError as error:
            raise RlctlError(
                f"the run cannot be recorded: {error.strerror or error}",
                where=str(self._records),
                fix="free space, or set run.record=events",
            ) from error

    def begin_round(self, kl_coef: float) -> None:
        """A local update begins, with this weight of the KL."""
        self._kl_coef = kl_coef

    def end_round(self, step: StepState, kl_coef: float) -> None:
        """A local update has ended; its rows change no more."""
        self._rounds.append(recorded_round(step, self._kl_coef, kl_coef))

    def end_step(self, step: int, metrics: Mapping[str, float], model: ModelEngine, critic: Critic | None) -> None:
        """A step has ended and is in the event log. What depends on the weights is looked at here and now."""
        self._publish(
            step,
            metrics,
            self._bands.add(metrics),
            params_sha256=model.params_digest(),
            critic_sha256="" if critic is None else critic.params_digest(),
            state_sha256=state_digests(model) if self._full else {},
        )

    def fail_step(self, step: StepState, error: Exception, kl_coef: float) -> None:
        """A step ended with an error. Of that step stays what there is: it is an anomaly. Nothing is kept of one that
        failed before it had rewarded responses."""
        stage = step.stage
        if len(self._rounds) > step.round:
            stage = "on_step_end"  # the stages had all run
        elif stage in STAGES[STAGES.index("balance") :]:
            self.end_round(step, kl_coef)
        if self._rounds:
            failure = Failure(stage, step.round, words_of(error))
            self._publish(
                step.number, step.metrics, [f"it failed in stage {failure.stage}: {failure.message}"], failure
            )

    def _publish(
        self,
        step: int,
        metrics: Mapping[str, float],
        why: list[str],
        failure: Failure | None = None,
        *,
        params_sha256: str = "",
        critic_sha256: str = "",
        state_sha256: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Have a step written; ``why``: it stays beyond the window."""
        rounds, self._rounds = self._rounds, []
        decisions, self._decisions = self._decisions, []
        self._step = step
        if self._standing is None:
            self._standing = self._checkpoints.steps()
        checkpoints = self._standing
        before = max((c for c in checkpoints if c < step), default=None)
        manifest = Manifest(
            schema=SCHEMA,
            rlctl_version=rlctl.__version__,
            step=step,
            version=step,
            attempt=self._told.attempt,
            mode=self._told.mode,
            config_sha256=self._config_sha256,
            fingerprint=dict(self._told.fingerprint),
            layout=dict(self._told.layout),
            total_steps=self._told.total_steps,
            events=EventRange(*self._events.cut()),
            checkpoint=self._reference(before),
            rounds=[info for _, info in rounds],
            replicas=[],
            decisions=decisions,
            params_sha256=params_sha256,
            critic_sha256=critic_sha256,
            state_sha256=dict(state_sha256),
            metrics=figures_out(metrics),
            failure=failure,
        )
        if why and self._most_pins:
            self._pins = [*self._pins, Pin(step, why, before)][-self._most_pins :]
            self._events.emit(Noted(message=f"step {step} stays recorded: {'; '.join(why)}"))
        first = self._window.first(step, checkpoints)
        write = partial(self._write, manifest, [rows for rows, _ in rounds], list(self._pins), first)
        self._background.give(write)

    def flush(self) -> None:
        """Wait until the records of all steps that have ended are on disk, where they survive a loss of power."""
        self._background.give(self._settle)
        self._background.drain()

    def end(self) -> None:
        """Write what waits, and what the event log holds behind the last step. Nothing more is recorded."""
        self._background.give(self._settle)
        self._background.close()
        self._attempt("the end of the run", lambda: replace(self._records / END, self._rest()))

    def seal(self) -> None:
        """Note the digests of what the run has written, now that it writes no more; see ``sealing``."""
        self._attempt("the digests of the run's end", lambda: seal(self._records.parent))

    def _rest(self) -> bytes:
        self._events.flush()
        return msgspec.json.encode(EventRange(*self._events.cut()))

    def _write(self, manifest: Manifest, rounds: Sequence[RoundRows], pins: list[Pin], first: int) -> None:
        """Publish a record and let go those before ``first``; on the writing thread."""

        def write() -> None:
            columns, replicas = to_columns(rounds)
            folder = write_bundle(self._records, msgspec.structs.replace(manifest, replicas=replicas), columns)
            self._unsettled.append(folder)
            if any(pin.step == manifest.step for pin in pins):
                write_pins(self._records / PINS, pins)

        self._attempt(f"step {manifest.step}", write)
        for old in discarded(recorded_steps(self._records), first, pins):
            self._attempt(f"step {old}", partial(discard, step_folder(self._records, old)), "still there")

    def _settle(self) -> None:
        """On the writing thread."""
        folders, self._unsettled = self._unsettled, []
        if folders:
            self._attempt(f"what was recorded since {folders[0].name}", partial(settle, folders), "not safe on disk")

    def _attempt(self, what: str, act: Callable[[], object], outcome: str = "not recorded") -> None:
        try:
            act()
        except OSError as error:
            self._events.emit(Noted(message=f"{what} is {outcome}: {error.strerror or error}"))

    def _needed(self, steps: Sequence[int]) -> list[int]:
        self._standing = None
        pinned = [pin.checkpoint for pin in self._pins if pin.checkpoint is not None]
        return [*self._window.needed(self._step, steps), *pinned]

    def _reference(self, checkpoint: int | None) -> CheckpointRef | None:
        if checkpoint is None:
            return None
        if checkpoint not in self._tensors:
            self._tensors[checkpoint] = self._checkpoints.tensors_sha256(checkpoint)
        return CheckpointRef(self._checkpoints.path(checkpoint).name, self._tensors[checkpoint])

    def _read_pins(self) -> list[Pin]:
        try:
            return read_pins(self._records / PINS)
        except RecordError as error:
            self._events.emit(Noted(message=f"the list of pinned steps is left out: {error.what}"))
            return []

    def _heard(self, event: Event) -> None:
        if isinstance(event, _DECIDED):
            self._decisions.append(msgspec.to_builtins(event))
