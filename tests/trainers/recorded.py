"""Whole recorded runs in folders of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlctl.config import to_json
from rlctl.ops.resuming import resolve_run
from rlctl.ops.run_path import RunPath
from rlctl.ops.train import run_training

SMALL = {
    "run.record": "batches", "run.threads": "1", "run.validate_prompts": "0", "run.checkpoint_every": "2",
    "trainer.prompts_per_step": "4", "trainer.mini_batch_prompts": "2", "trainer.optimizer.lr": "1e-4",
    "rollout.samples_per_prompt": "4", "rollout.max_new_tokens": "16",
}  # fmt: skip


def record(folder: Path, *overrides: str, steps: int = 4, resume: bool = False) -> dict[str, Any]:
    """Train in ``folder`` and return the result."""
    path = RunPath(folder, resume=resume, saved_config=folder / "config.json" if resume else None)
    given = {**({} if resume else SMALL), "run.steps": str(steps), **dict(word.split("=", 1) for word in overrides)}
    resolution = resolve_run(path, overrides=[f"{key}={value}" for key, value in given.items()])
    resolution.require_valid()
    return run_training(resolution.config, path, document=to_json(resolution.resolved))
