"""Whole runs on several trainer ranks, in real processes over gloo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlctl.errors import UnavailableError
from rlctl.ops.requirements import require_built
from rlctl.ops.resolve import resolve
from tests.trainers.sessions import Run

TWO = ("cluster.devices_per_node=2", "placement.trainer_ranks=2")
FOUR = ("cluster.devices_per_node=4", "placement.trainer_ranks=4", "placement.trainer_tp=2")
STEPS = 20
ARGUMENTS = (
    f"run.steps={STEPS}", "run.threads=1", "run.checkpoint_every=4", "run.validate_prompts=0",
    "trainer.prompts_per_step=4", "trainer.mini_batch_prompts=2", "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=24", "trainer.optimizer.lr=1e-3",
)  # fmt: skip


def test_a_run_on_two_ranks_learns_as_one_does_and_goes_on_with_one(tmp_path):
    many = Run(tmp_path / "many", *TWO, "run.checkpoint_every=2", "algorithm.kl.place=loss")
    one = Run(tmp_path / "one", "algorithm.kl.place=loss")
    # The same weights make the same responses; then rounding sets the two apart.
    assert many.metrics[0]["reward"] == one.metrics[0]["reward"]
    for name in ("loss", "grad_norm", "kl_loss", "logprob_gap"):
        assert many.metrics[0][name] == pytest.approx(one.metrics[0][name], rel=1e-3, abs=1e-5), name
    on = Run(tmp_path / "many", "algorithm.kl.place=loss", steps=3, resume=True)
    assert len(on.metrics) == 1


def test_megatron_says_what_it_needs():
    resolution = resolve(env={}, overrides=["model.engine=megatron"])
    with pytest.raises(UnavailableError, match=r"not in this version(.|\n)*megatron-core(.|\n)*model.engine=fsdp2"):
        require_built(resolution)


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rlctl", "train", "--json", "--run-dir", str(folder), *ARGUMENTS, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> dict:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [TWO, FOUR], ids=["fsdp2-2", "fsdp2-2-tp-2"])
def test_twenty_steps_twice_and_killed_in_between(tmp_path, layout):
    first = finish(start(tmp_path / "first", *layout))
    again = finish(start(tmp_path / "again", *layout))
    assert first["params_digest"] == again["params_digest"]
    assert first["reward"] == again["reward"]
    killed = start(tmp_path / "killed", *layout)
    end = time.monotonic() + 300
    while not (tmp_path / "killed" / "ckpt" / "step_8").exists():
        assert time.monotonic() < end and killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    resumed = finish(start(tmp_path / "killed", "--resume", "auto"))
    assert resumed["params_digest"] == first["params_digest"]
    shutil.rmtree(tmp_path / "again" / "ckpt" / f"step_{STEPS}")
    elsewhere = finish(
        start(tmp_path / "again", "--resume", "auto", "placement.trainer_ranks=1", "placement.trainer_tp=1",
              "model.engine=local")
    )  # fmt: skip
    assert elsewhere["steps"] == STEPS
    assert os.listdir(tmp_path / "first" / "final")  # noqa: PTH208
