"""LoRA runs: equal again bit for bit, resumed too, and learning; refused before the first step where they cannot be."""

import shutil
from pathlib import Path

import pytest

from rlctl.errors import RlctlError, UsageError
from tests.trainers.sessions import Run

LORA = ["model.lora.rank=8", "trainer.optimizer.lr=2e-3"]


@pytest.fixture(scope="module")
def twenty_steps(tmp_path_factory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("lora")
    return Run(folder, *LORA, "run.checkpoint_every=10", steps=20), folder


def test_twenty_steps_are_equal_again_and_learn(twenty_steps, tmp_path):
    first, _ = twenty_steps
    assert Run(tmp_path, *LORA, steps=20).digests == first.digests
    rewards = [metrics["reward"] for metrics in first.metrics]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2
    assert max(metrics["logprob_gap_max"] for metrics in first.metrics) < 1e-4


def test_resumed_from_the_middle_it_ends_with_the_same_bits(twenty_steps, tmp_path):
    first, folder = twenty_steps
    shutil.copytree(folder / "ckpt" / "step_10", tmp_path / "ckpt" / "step_10")
    resumed = Run(tmp_path, *LORA, steps=20, resume=True)
    assert len(resumed.metrics) == 10
    assert resumed.digests == first.digests


def test_a_checkpoint_holds_the_adapter_and_not_the_model(twenty_steps):
    _, folder = twenty_steps
    assert (folder / "ckpt" / "step_20" / "tensors.safetensors").stat().st_size < 700_000


def test_a_checkpoint_of_another_adapter_does_not_load(twenty_steps, tmp_path):
    _, folder = twenty_steps
    shutil.copytree(folder / "ckpt" / "step_10", tmp_path / "ckpt" / "step_10")
    with pytest.raises(RlctlError, match="differ"):
        Run(tmp_path, "model.lora.rank=4", steps=20, resume=True)


def test_a_target_that_no_module_has_stops_the_run_before_its_first_step(tmp_path):
    with pytest.raises(UsageError, match="no module of the model is named q_prj"):
        Run(tmp_path, "model.lora.rank=4", "model.lora.target_modules=[q_prj]")
