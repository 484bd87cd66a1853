"""Evaluating a checkpoint, or a model, without training: nothing of the run it belongs to is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlctl.errors import UsageError
from rlctl.experience.event_log import EventLog, Listener
from rlctl.ops.inputs import find_inputs
from rlctl.ops.run_path import RunPath
from rlctl.runtime.checkpoint_names import checkpoint_steps
from rlctl.runtime.signals import StopSignal
from rlctl.runtime.threads import prepare_environment
from rlctl.schema import Config


def run_evaluation(config: Config, run: RunPath, *, resume: bool, listeners: Sequence[Listener] = ()) -> dict[str, Any]:
    """Answer the held-out prompts greedily and return the document: what was evaluated, and how well it did.

    Args:
        config: resolved.
        run: what to load. Its folder is only read, also while the run is under way.
        resume: whether a checkpoint was asked for; otherwise ``model.path`` is evaluated as it is.
        listeners: called with every event.

    Raises:
        UsageError: there is no checkpoint, or there are no held-out prompts.
        RlctlError: the checkpoint cannot be read.
    """
    if resume and run.fork_from is None and not (run.resume and checkpoint_steps(run.path / "ckpt")):
        where = f"under {run.path}" if run.resume else "to go on from"
        fix = "give a run folder or a checkpoint by --resume, or a model folder by --model"
        raise UsageError(f"there is no checkpoint {where}", where="--resume", fix=fix)
    if not config.run.validate_prompts:
        raise UsageError("no prompts to evaluate", where="run.validate_prompts", fix="set it to 1 or more")
    prepare_environment()
    inputs = find_inputs(config)
    events = EventLog(None)
    for listener in listeners:
        events.subscribe(listener)
    from rlctl.ops.session import Session  # torch and transformers come in here

    with Session(config, inputs, events, run.path / "ckpt", StopSignal()) as session:
        trainer = session.trainer
        if not session.parts.held_out:
            raise UsageError("the task has no held-out prompts", where="task.held_out", fix="raise task.held_out")
        if run.fork_from is not None:
            trainer.load_checkpoint(run.fork_from)
        elif resume:
            trainer.resume()
        begin = time.perf_counter()
        trainer.on_init_end()
        trainer.validate()
        step, found = trainer.evaluations[-1]
        folder = run.fork_from or run.path / "ckpt" / f"step_{step}"
        return {
            "checkpoint": str(folder) if resume else None,
            "model": config.model.path,
            "task": inputs.task.name,
            "step": step,
            "eval": asdict(found),
            "seconds": time.perf_counter() - begin,
            "params_digest": session.parts.model.params_digest(),
        }
