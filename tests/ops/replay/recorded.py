"""Small runs with records, trained once a module."""

from __future__ import annotations

import os
from pathlib import Path

from tests.warm_starts import run_module

SETTINGS = (
    "run.steps=3", "run.record=batches", "run.deterministic=true", "run.validate_before=false", "run.threads=1",
    "trainer.prompts_per_step=4", "trainer.mini_batch_prompts=4", "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=24", "run.checkpoint_every=1", "run.keep_checkpoints=8",
)  # fmt: skip


def train(run: Path, *words: str) -> None:
    """Run ``rlctl train`` in a process of its own."""
    done = run_module("rlctl", ["train", *words, "-q"], timeout=240, env={**os.environ, "CI": "1"})
    assert done.returncode == 0, done.stderr
    assert (run / "config.json").exists()


def new_run(run: Path, *settings: str) -> Path:
    """Train a small run and return its folder."""
    train(run, "--run-dir", str(run), *SETTINGS, *settings)
    return run
