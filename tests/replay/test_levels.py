"""Steps of whole runs, computed again from their records."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from rlctl.errors import UsageError
from rlctl.replay.recompute import recompute
from rlctl.replay.reliving import relived
from rlctl.replay.replaying import recomputed, trained_under
from rlctl.replay.walk import Walk, rerun
from tests.trainers.threaded import LAYOUT, threaded

from .kept import KeptRun

__all__ = ["threaded"]  # the fixture

pytestmark = pytest.mark.timeout(240)


RECIPES = {
    "grpo": (),
    "decoupled": ("trainer.old_log_probs=recompute", "algorithm.rollout_correction.preset=decoupled_geo_rs_token_tis"),
    "bypass": ("algorithm.rollout_correction.preset=bypass_pg_geo_rs_seq_tis",),
    "kl-loss": ("algorithm.kl.place=loss", "algorithm.kl.coef=0.1", "algorithm.kl.target=0.01"),
    "kl-reward": ("algorithm.kl.place=reward", "algorithm.kl.coef=0.1"),
    "entropy": ("algorithm.entropy_coef=0.01",),
    "gae": ("algorithm.preset=ppo", "algorithm.critic.warmup_steps=1"),
    "mask": ("algorithm.overlong_responses=mask", "algorithm.aggregation=seq-mean-token-mean"),
    "drop": ("algorithm.overlong_responses=drop",),
    "lora": ("model.lora.rank=4",),
    "one-update": ("trainer.mini_batch_prompts=4", "trainer.micro_batch_tokens=280"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_comes_out_as_it_was(recipe, tmp_path):
    run = KeptRun(tmp_path, *RECIPES[recipe], steps=3)
    assert [recompute(run.step(step)).status for step in run.steps] == ["exact"] * 3
    with ExitStack() as stack:
        walk = Walk(run, run.steps[0], stack)
        found = [rerun(walk, run, step) for step in (1, 3, 2)]
    assert [(f.status, f.first_difference) for f in found] == [("exact", None)] * 3
    assert found[1].params_digest == run.digest


def test_a_number_that_was_changed_is_named(tmp_path):
    run = KeptRun(tmp_path, steps=2)
    told = run.step(2).rounds[0]
    rows = [replace(row) for row in told.rows]
    rows[3].advantages = np.nextafter(rows[3].advantages, np.float32(9))
    record = replace(run.step(2), rounds=[replace(told, rows=rows)])
    found = recompute(record)
    assert found.status == "differs" and found.first_difference is not None
    assert (found.first_difference.stage, found.first_difference.tensor) == ("advantages", "advantages")


MODES = {
    "sync": (),
    "colocate_async": ("trainer.mode=colocate_async",),
    "lora": ("model.lora.rank=4",),
    "bfloat16": ("model.dtype=bfloat16",),
    "turns": ("task.name=two_turn",),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_segment_is_made_again(mode, tmp_path):
    run = KeptRun(tmp_path, "run.deterministic=true", "rollout.max_new_tokens=32", *MODES[mode], steps=3)
    found = list(relived(run, run.steps, levels=["R2", "R3"]))
    assert [(f.step, f.level, f.status, f.reason) for f in found] == [
        (step, level, "exact", "") for step in run.steps for level in ("R2", "R3")
    ]


def test_what_if_is_what_training_under_it_gives(tmp_path):
    run = KeptRun(tmp_path / "a")
    for settings in (["trainer.optimizer.lr=0.01"], ["algorithm.normalize_std=false", "algorithm.clip_high=0.1"]):
        (found,) = trained_under(run, [3], settings)
        assert found.status == "differs" and found.params_digest != run.step(3).params_digest
        folder = tmp_path / settings[0].partition("=")[0]
        other = KeptRun(folder, *settings, steps=3, begin=tmp_path / "a" / "ckpt" / "step_2")
        assert found.params_digest == other.digest
        assert found.metrics["loss"] == other.step(3).rounds[0].metrics["loss"]
    with pytest.raises(UsageError, match=r"rollout\.temperature cannot be asked of a record"):
        next(trained_under(run, [3], ["rollout.temperature=2"]))


BESIDE = {
    "one_step_off": ("trainer.mode=one_step_off", *LAYOUT, "trainer.mini_batch_prompts=4"),
    "separate_async": ("trainer.mode=separate_async", *LAYOUT, "trainer.parameter_sync_step=2"),
}


@pytest.mark.parametrize(
    ("mode", "deterministic"),
    [
        pytest.param("separate_async", "true", marks=pytest.mark.slow),
        pytest.param("separate_async", "false", marks=pytest.mark.slow),
        pytest.param("one_step_off", "true", marks=pytest.mark.slow),
        pytest.param("one_step_off", "false", marks=pytest.mark.slow),
    ],
)
def test_rollouts_beside_the_trainer(threaded, tmp_path, mode, deterministic):
    run = KeptRun(tmp_path, f"run.deterministic={deterministic}", *BESIDE[mode])
    assert {f.status for f in recomputed(run, run.steps)} == {"exact"}
    found = list(relived(run, run.steps, levels=["R2", "R3"]))
    exact = [f for f in found if f.level == "R2" or deterministic == "true"]
    assert [(f.step, f.level, f.status, f.reason) for f in exact if f.status != "exact"] == []
    assert [f.params_digest for f in found if f.params_digest][-1] == run.digest


@pytest.mark.slow
def test_a_step_of_two_ranks(tmp_path):
    ranks = ("cluster.devices_per_node=2", "placement.trainer_ranks=2", "algorithm.kl.place=loss")
    run = KeptRun(tmp_path, "run.deterministic=true", *ranks)
    assert run.config.model.engine == "fsdp2"
    assert {f.status for f in recomputed(run, run.steps)} == {"exact"}
    found = list(relived(run, run.steps, levels=["R2", "R3"]))
    assert [(f.step, f.level, f.status, f.reason) for f in found if f.status != "exact"] == []
    assert [f.params_digest for f in found if f.params_digest][-1] == run.digest
