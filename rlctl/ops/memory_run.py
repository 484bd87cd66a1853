"""A short real run in a process of its own, with its memory looked at phase by phase."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlctl.errors import RlctlError, UnavailableError
from rlctl.memory.advice import changed
from rlctl.process import Channel, ChildDied, start
from rlctl.schema import Config

STEPS = 2
"""The first makes the optimizer's moments, the others count."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""glibc's settings under which freed memory goes back to the system at once, so that peaks are those of live tensors.
By default the threshold grows with what is freed, and a freed gigabyte may stay resident."""


@dataclass(frozen=True)
class Measured:
    """What a run took.

    Attributes:
        peaks: phase -> bytes above those of the imports.
        extras: phase -> what else the probe knew then, in bytes.
        imports: bytes in use after the imports.
        probe: what was counted.
        allocator: settings of the process's allocator.
    """

    peaks: dict[str, int]
    extras: dict[str, dict[str, int]]
    imports: int
    probe: str
    allocator: dict[str, str]


def measure_run(document: dict[str, Any], folder: Path, *, timeout: float) -> Measured:
    """Run the configuration of ``document`` (a saved config.json) in ``folder`` and return its memory by phase.

    Raises:
        RlctlError: the run failed or did not end within ``timeout`` seconds.
    """
    log = folder / "measured.log"
    child = start("rlctl.ops.memory_run:serve", name="memory-profile", output=log, env=ALLOCATOR)
    with child:
        try:
            answer = child.request({"document": document, "folder": str(folder)}, timeout, dict[str, Any])
        except ChildDied as error:
            raise RlctlError(f"the measured run ended early: {error.reason}", fix=_last_line(log)) from error
        except TimeoutError as error:
            raise RlctlError(
                f"the measured run was not over after {timeout:.0f} s",
                fix="give a longer --timeout, or smaller rollout.max_new_tokens and trainer.micro_batch_tokens",
            ) from error
    if "error" in answer:
        raise RlctlError(f"the measured run failed: {answer['error']}", fix=answer.get("fix"))
    return msgspec.convert(answer, Measured)


def _last_line(log: Path) -> str | None:
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return f"its last line: {lines[-1]}" if lines else None


def serve(channel: Channel) -> None:
    """Entry point of the measured process: one request, one answer."""
    request = channel.receive(60.0, dict[str, Any])
    try:
        answer: dict[str, Any] = msgspec.to_builtins(_run(request["document"], Path(request["folder"])))
    except RlctlError as error:
        answer = {"error": error.message, "fix": error.fix}
    channel.send(answer, 60.0)


def _run(document: dict[str, Any], folder: Path) -> Measured:
    from rlctl.config.saved import from_json
    from rlctl.runtime.threads import prepare_environment

    prepare_environment()
    config = from_json(document, "the request").config
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from rlctl.memory.recorder import PhaseRecorder
    from rlctl.ops.run_path import choose_run_path
    from rlctl.ops.train import run_training

    # Libraries import their parts, and set up their own buffers, when they are first used: all of it before the mark.
    run_training(_smallest(config), choose_run_path(folder / "first", None, name="first"), document=document)
    _give_back()
    probe = _probe(config.cluster.device)
    imports = probe.now()
    probe.mark()
    recorder = PhaseRecorder(probe)
    hook = register_optimizer_step_pre_hook(lambda *_: recorder.before_optimizer())
    run = choose_run_path(folder / "run", None, name="measured")
    try:
        run_training(config, run, document=document, listeners=[recorder.on_event])
    finally:
        hook.remove()
    settings = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    return Measured(recorder.peaks, recorder.extras, imports, probe.name, settings)


def _smallest(config: Config) -> Config:
    """Return the same run with the built-in model, and so few tokens that it takes no memory to speak of."""
    values: dict[str, object] = {
        "model.path": "cycle-tiny",
        "task.name": "cycle",
        "task.mixture": [],
        "task.verifier": None,
        "task.step": None,
        "task.chat": "auto",
        "task.system": None,
        "task.held_out": 0.1,
        "task.overlong_prompts": "truncate",
        "trainer.prompts_per_step": 1,
        "trainer.mini_batch_prompts": 1,
        "rollout.samples_per_prompt": 2,
        "rollout.max_new_tokens": 4,
        "rollout.max_slots": 4,
        "run.steps": 1,
    }
    for key, value in values.items():
        config = changed(config, key, value)
    return config


def _give_back() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _probe(device: str) -> Any:
    from rlctl.memory.probes import CudaProbe, ResidentProbe

    if device == "cpu":
        return ResidentProbe()
    if device == "cuda":
        return CudaProbe()
    raise UnavailableError(f"memory of {device} devices is not measured", fix="leave out --measure")
