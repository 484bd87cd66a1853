"""A mode that another package brings: found by its entry point, with its own defaults, rules and hooks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODE = '''
from rlctl.errors import Finding
from rlctl.trainers.base import Trainer
from rlctl.trainers.contracts import ModeContract
from rlctl.trainers.rules import Rule


def the_batch_is_even(config):
    if config.trainer.prompts_per_step % 2 == 0:
        return None
    return Finding("an odd batch", "trainer.prompts_per_step", "take an even one")


class EveryOther(Trainer):
    """Weights are synced after every second step only."""

    contract = ModeContract(
        "every_other",
        "a mode of another package",
        {"trainer.max_staleness": 1, "trainer.warmup_batches": 0.0, "trainer.old_log_probs": "recompute"},
        (Rule("the batch is even", the_batch_is_even),),
    )

    def on_init_end(self):
        self.update_weights()

    def on_sample_end(self, step):
        if step.number % 2 == 0:
            self.parts.rollouts.sleep()

    def on_step_end(self, step):
        if step.error is None and step.number % 2 == 0:
            self.update_weights()
'''
ARGUMENTS = (
    "trainer.mode=every_other", "run.steps=4", "trainer.prompts_per_step=4", "rollout.samples_per_prompt=2",
    "rollout.max_new_tokens=8", "run.validate_prompts=0", "run.threads=1",
)  # fmt: skip


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    info = tmp_path / "every_other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: every-other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlctl.trainers]\nevery_other = every_other:EveryOther\n")
    (tmp_path / "every_other.py").write_text(MODE)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def rlctl(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlctl", "train", "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250, check=False)


def test_it_runs(environment, tmp_path):
    done = rlctl(environment, "--run-dir", str(tmp_path / "run"), *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["mode"] == "every_other" and document["steps"] == 4
    # The weights of steps 2 and 4 are those of the step before.
    assert document["staleness"] == {"mean": 0.5, "max": 1.0, "tokens": document["staleness"]["tokens"]}
    assert document["sync"]["count"] == 3


def test_its_rules_hold_before_anything_starts(environment, tmp_path):
    done = rlctl(
        environment, "--run-dir", str(tmp_path / "run"), "trainer.mode=every_other", "trainer.prompts_per_step=3"
    )
    assert done.returncode == 2 and "an odd batch" in done.stderr
    assert not (tmp_path / "run").exists()
