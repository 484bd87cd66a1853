"""Prediction beside measurement, of a run cut to the few steps and prompts that memory depends on."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.config import to_json
from rlctl.errors import UnavailableError
from rlctl.memory.advice import changed
from rlctl.memory.workload import Workload
from rlctl.ops.memory_model import measurable_model, write_prompts
from rlctl.ops.memory_profile import MemoryProfile, profile_memory
from rlctl.ops.memory_run import STEPS, Measured, measure_run
from rlctl.ops.model_spec import spec_of
from rlctl.ops.requirements import require_built, require_hardware
from rlctl.ops.resolve import Resolution
from rlctl.runtime.threads import thread_count
from rlctl.schema import Config


@dataclass(frozen=True)
class Comparison:
    """What was predicted for a run, and what it took."""

    profile: MemoryProfile
    measured: Measured


def measure_memory(resolution: Resolution, *, timeout: float) -> Comparison:
    """Run what ``resolution`` describes, for ``STEPS`` steps, in a process of its own, and predict the same run.

    Every prompt has ``task.max_prompt_tokens`` tokens, and a step has as many prompts as fill the slots of the replica
    and the largest micro-batch: more of them take longer and no more memory.

    Raises:
        UnavailableError: the layout needs hardware or processes that are not here.
        RlctlError: the run failed, or did not end within ``timeout`` seconds.
    """
    config = resolution.config
    if config.placement.trainer_ranks > 1 or config.placement.layout != "colocated":
        raise UnavailableError(
            "a measurement runs trainer and replica in one process",
            where="--measure",
            fix="measure a profile of one rank, such as cpu-quickstart; predictions need no --measure",
        )
    require_hardware(resolution)
    require_built(resolution)
    with tempfile.TemporaryDirectory(prefix="rlctl-memory-") as name:
        folder = Path(name)
        model = measurable_model(config.model.path, folder / "model")
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, model, config.task.max_prompt_tokens)
        short = _short(config, model, prompts)
        run = replace(resolution, resolved=replace(resolution.resolved, config=short))
        asked = profile_memory(resolution)
        profile = replace(profile_memory(run), model=asked.model, largest=asked.largest, advice=asked.advice)
        measured = measure_run(to_json(run.resolved), folder, timeout=timeout)
    return Comparison(profile, measured)


def _short(config: Config, model: str, prompts: Path) -> Config:
    work = Workload(config, spec_of(config.model.path), threads=thread_count(config.run.threads))
    rows = max(work.micro_batch.rows + (not work.single_pass), work.replica_rows)
    values: dict[str, object] = {
        "model.path": model,
        "task.name": str(prompts),
        "task.mixture": [],
        "task.verifier": "exact",
        "task.step": None,
        "task.chat": "auto",
        "task.system": None,
        "task.held_out": 0.0,
        "trainer.prompts_per_step": -(-rows // config.rollout.samples_per_prompt),
        "run.steps": STEPS,
        "run.checkpoint_every": 0,
        "run.validate_before": False,
        "run.trackers": [],
    }
    for key, value in values.items():
        config = changed(config, key, value)
    return config
