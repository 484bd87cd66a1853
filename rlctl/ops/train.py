"""``rlctl train`` as a function: a configuration in, a finished run folder and its result out."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import RlctlError, StoppedError, UsageError
from rlctl.experience.event_log import EventLog, Listener
from rlctl.experience.events import SCHEMA as EVENTS_SCHEMA
from rlctl.experience.events import Event, Noted, RunStarted, StepEnded
from rlctl.ops.inputs import Inputs, find_inputs
from rlctl.ops.mode_results import mode_results
from rlctl.ops.run_path import RunPath
from rlctl.ops.task_results import task_results
from rlctl.ops.tracking import start_trackers
from rlctl.runtime.checkpoint_names import checkpoint_steps
from rlctl.runtime.environment import environment_report
from rlctl.runtime.run_directory import RunDirectory
from rlctl.runtime.signals import StopSignal
from rlctl.runtime.threads import prepare_environment
from rlctl.schema import Config
from rlctl.trackers.listener import Trackers
from rlctl.trackers.registry import require_trackers

if TYPE_CHECKING:
    from rlctl.ops.session import Session

log = logging.getLogger(__name__)

FIRST_STEPS = 3
LAST_STEPS = 20
_LORA = tuple(f"model.lora.{key}" for key in ("rank", "alpha", "target_modules", "use_rslora", "use_dora", "adapter"))
_FIXED = ("model.path", "task.name", "task.mixture", "run.seed", *_LORA)


def run_training(
    config: Config,
    run: RunPath,
    *,
    document: Mapping[str, Any],
    overwrite: bool = False,
    listeners: Sequence[Listener] = (),
    on_start: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train and return the result document.

    Args:
        config: resolved.
        run: where to run and what to go on from.
        document: the resolved configuration as ``rlctl.config.to_json`` gives it, for config.json and for comparing
            with an earlier attempt.
        overwrite: replace an earlier run in the folder.
        listeners: called with every event of the run.
        on_start: called once, before the first step, with run_dir, steps and step (where it goes on from).

    Raises:
        PreemptedError: a signal asked for a stop; a checkpoint is saved.
        RlctlError: anything else that a user can act on.
    """
    run.require_trainable()
    prepare_environment()
    inputs, trackers = find_inputs(config), require_trackers(config.run.trackers)
    directory = RunDirectory.open(run.path, resume=run.resume, overwrite=overwrite, fresh=run.fresh)
    attempt = _Attempt(config, inputs, run, directory, document, trackers)
    try:
        return attempt.train(listeners, on_start)
    except KeyboardInterrupt as error:
        raise _stopped(directory.path) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise RlctlError(
                f"the run stopped: {error.strerror}",
                where=str(error.filename or directory.path),
                fix="free space and continue with --resume auto",
            ) from error
        raise
    finally:
        if attempt.began:
            directory.close()
        else:
            directory.discard()


def _stopped(path: Path) -> StoppedError:
    steps = checkpoint_steps(path / "ckpt")
    if not steps:
        return StoppedError("interrupted before the first checkpoint")
    folder = shlex.quote(str(path))
    return StoppedError("interrupted", fix=f"go on after step {steps[-1]}: rlctl train --resume {folder}")


class _Attempt:
    """One start of a run in its folder. ``began`` turns true when there is something to keep."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        run: RunPath,
        directory: RunDirectory,
        document: Mapping[str, Any],
        trackers: Mapping[str, str],
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._run = run
        self._directory = directory
        self._document = document
        self._trackers = trackers
        self.began = False

    def train(self, listeners: Sequence[Listener], on_start: Callable[[dict[str, Any]], None] | None) -> dict[str, Any]:
        """Train to the end and return the result document."""
        directory = self._directory
        done = directory.read_document("result.json") if self._run.resume else None
        changes = _changes(directory.read_document("config.json") if self._run.resume else None, self._document)
        if done is not None and not changes:
            self.began = True
            log.info("the run is complete; nothing is left to do")
            return done
        directory.start_log()
        record = self._config.run.record
        events = EventLog(directory.path / "events.jsonl" if record != "off" else None, attempt=directory.attempt)
        for listener in listeners:
            events.subscribe(listener)
        with StopSignal() as stop:
            from rlctl.ops.session import Session  # torch and transformers come in here

            checkpoints, output = directory.path / "ckpt", directory.path / "logs" / "reward.log"
            with Session(self._config, self._inputs, events, checkpoints, stop, output=output) as session:
                info = self._begin(session, events, changes)
                if on_start is not None:
                    on_start(info)
                trackers = self._track(events, info["step"])
                began = time.perf_counter()
                try:
                    session.trainer.fit()
                finally:
                    seconds = time.perf_counter() - began
                    trackers.finish()
                    events.close()
                result = _result(session, directory, seconds)
                save_final(session, directory.path / "final")
                directory.write_document("result.json", result)
                if session.parts.recorder is not None:
                    session.parts.recorder.seal()
                return result

    def _track(self, events: EventLog, from_step: int) -> Trackers:
        folder, document = self._directory.path, self._document
        return start_trackers(self._trackers, self._config, folder, events, document=document, from_step=from_step)

    def _begin(self, session: Session, events: EventLog, changes: Sequence[str]) -> dict[str, Any]:
        """Load what the run goes on from and write what describes this attempt."""
        directory = self._directory
        resumed_from = _restore(session, self._run)
        done, wanted = session.trainer.step_number, session.parts.total_steps
        if done > wanted:
            raise UsageError(
                f"the run has {done} steps already, more than the {wanted} asked for",
                where="run.steps",
                fix="give a higher run.steps, or fork from an earlier checkpoint with --run-dir NEW",
            )
        directory.write_document("config.json", self._document)
        directory.write_document("env.json", environment_report(threads=session.threads))
        (directory.path / "result.json").unlink(missing_ok=True)
        first = session.trainer.step_number
        directory.start_metrics(from_step=first)
        events.subscribe(lambda event: _record_metrics(directory, event))
        if self._config.run.record in ("batches", "full"):
            from rlctl.ops.recording import start_recorder  # after torch, as above

            session.parts.recorder = start_recorder(session, directory, events)
        self.began = True
        mode, seed = self._config.trainer.mode, self._config.run.seed
        events.emit(RunStarted(mode=mode, seed=seed, from_step=first, from_seq=resumed_from, schema=EVENTS_SCHEMA))
        for message in changes:
            events.emit(Noted(message=f"changed since the run began: {message}"))
        return {"run_dir": str(directory.path), "steps": session.parts.total_steps, "step": first}


def _restore(session: Session, run: RunPath) -> int:
    if run.fork_from is not None:
        session.trainer.load_checkpoint(run.fork_from)
        return -1
    return session.trainer.resume() if run.resume else -1


def _changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two configurations, a line each; refuse what cannot change within a run."""
    if before is None:
        return []
    old, new = _flat(before["config"]), _flat(now["config"])
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    fixed = [key for key in changed if key in _FIXED and key in old]
    if fixed:
        key = fixed[0]
        raise UsageError(
            f"{key} was {old.get(key)} when this run began and is {new.get(key)} now",
            where="--resume",
            fix="start another run in a folder of its own",
        )
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in changed]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat.update(_flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value})
    return flat


def _record_metrics(directory: RunDirectory, event: Event) -> None:
    if isinstance(event, StepEnded):
        directory.add_metrics({"step": event.step, **event.figures})


def _result(session: Session, directory: RunDirectory, seconds: float) -> dict[str, Any]:
    lines = directory.read_metrics()
    rewards = [line["reward"] for line in lines]
    step_seconds = sum(line["seconds"] for line in lines)
    evaluations = session.trainer.evaluations
    before = evaluations[0][1] if evaluations and evaluations[0][0] == 0 else None
    after = evaluations[-1][1] if evaluations else None
    return {
        "run_dir": str(directory.path),
        "mode": session.parts.config.trainer.mode,
        "steps": session.trainer.step_number,
        "reward": {
            "first": _mean(rewards[:FIRST_STEPS]),
            "last": _mean(rewards[-LAST_STEPS:]),
            "curve": [round(value, 6) for value in rewards],
        },
        "tasks": task_results(lines, first=FIRST_STEPS, last=LAST_STEPS),
        **mode_results(lines),
        "eval": {
            "before": before.accuracy if before else None,
            "after": after.accuracy if after else None,
            "prompts": after.prompts if after else 0,
            "by_label": {
                label: {"before": before.by_label.get(label) if before else None, "after": value}
                for label, value in (after.by_label if after else {}).items()
            },
        },
        "samples_per_s": sum(line["samples"] for line in lines) / step_seconds if step_seconds else None,
        "tokens_per_s": sum(line["generated_tokens"] for line in lines) / step_seconds if step_seconds else None,
        "seconds": seconds,
        "params_digest": session.parts.model.params_digest(),
        **({} if session.parts.critic is None else {"critic_digest": session.parts.critic.params_digest()}),
        "final": str(directory.path / "final"),
        # What the adapter in final/ belongs to; null when final/ is a whole model.
        "adapter_of": session.source if session.parts.config.model.lora.rank else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def save_final(session: Session, folder: Path) -> None:
    """Write the trained model with its tokenizer as a folder that ``from_pretrained`` loads, in one step."""
    temporary = folder.with_name(f".final.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        session.parts.model.save_pretrained(temporary)
        session.tokenizer.save_pretrained(temporary)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
