"""LoRA runs: equal again bit for bit, resumed too, and learning; refused before the first step where they cannot be."""

import shutil
import sys
from pathlib import Path

import pytest

from rlctl.errors import RlctlError, UnavailableError, UsageError
from rlctl.experience.events import SyncEnded
from rlctl.ops.inputs import find_inputs
from rlctl.ops.resolve import resolve
from rlctl.ops.train import _changes as changes
from rlctl.runtime.models import load_models
from tests.trainers.sessions import Run

ONE_UPDATE = "trainer.mini_batch_prompts=4"
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


@pytest.mark.parametrize(
    "settings",
    [["algorithm.preset=ppo"], ["algorithm.kl.place=loss", ONE_UPDATE], ["model.dtype=bfloat16"]],
    ids=lambda s: s[0],
)
def test_what_stands_beside_the_actor_stands_beside_an_adapter_too(settings, tmp_path):
    run = Run(tmp_path, *LORA, *settings)
    assert all(metrics["grad_norm"] > 0 and metrics["skipped_updates"] == 0 for metrics in run.metrics)
    if "kl.place" in settings[0]:  # B is zero: policy and reference are one at first, and not after a step
        assert run.metrics[0]["kl_loss"] < 1e-6 < run.metrics[1]["kl_loss"]


def test_adapters_sent_alone_train_the_same_bits_as_merged_weights(tmp_path):
    settings = [*LORA, "run.checkpoint_every=2"]
    merged = Run(tmp_path / "merged", *settings, steps=3)
    alone = Run(tmp_path / "alone", *settings, "model.lora.sync=adapter", steps=3)
    assert alone.digests == merged.digests
    rewards = [[metrics["reward"] for metrics in run.metrics] for run in (merged, alone)]
    assert rewards[0] == rewards[1]
    first, *later = [event for event in alone.events if isinstance(event, SyncEnded)]
    whole = [event for event in merged.events if isinstance(event, SyncEnded)]
    assert len(later) == 3 and first.loaded > whole[0].loaded  # the base, and the adapter
    assert all(sync.loaded == first.loaded - whole[0].loaded and sync.bytes < first.bytes / 4 for sync in later)
    # A resumed run has a new engine, which is sent the base again.
    shutil.rmtree(tmp_path / "alone" / "ckpt" / "step_3")
    resumed = Run(tmp_path / "alone", *settings, "model.lora.sync=adapter", steps=3, resume=True)
    assert resumed.digests == merged.digests


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_model_under_the_adapter_is_the_reference_of_a_model_apart(place, tmp_path):
    settings = [*LORA, f"algorithm.kl.place={place}", "algorithm.kl.coef=0.1", ONE_UPDATE]
    switched = Run(tmp_path, *settings)
    apart = Run(tmp_path, *settings, "algorithm.kl.reference=cycle-tiny")
    assert switched.digests == apart.digests
    kl = f"kl_{place}"
    found = [[metrics[kl] for metrics in run.metrics] for run in (switched, apart)]
    assert found[0] == found[1] and abs(found[0][1]) > 1e-6


@pytest.mark.parametrize(("settings", "apart"), [(LORA, False), ([], True)], ids=["adapter", "all weights"])
def test_a_second_model_is_loaded_only_where_the_first_changes(settings, apart):
    config = resolve(env={}, overrides=["algorithm.kl.place=loss", *settings]).config
    assert (load_models(config, find_inputs(config)).reference is not None) == apart


def test_the_adapters_keys_do_not_change_when_a_run_goes_on():
    before = {"config": {"model": {"lora": {"rank": 8, "alpha": 16.0}}}}
    with pytest.raises(UsageError, match=r"model\.lora\.rank was 8"):
        changes(before, {"config": {"model": {"lora": {"rank": 4, "alpha": 16.0}}}})


def test_without_peft_the_run_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnavailableError, match=r"rlctl\[lora\]"):
        Run(tmp_path, *LORA)
