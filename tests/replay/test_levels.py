"""Steps of whole runs, computed again from their records."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from rlctl.replay.rebuild import Rebuilt
from rlctl.replay.recompute import recompute
from rlctl.replay.walk import Walk, rerun

from .kept import KeptRun

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
    run = KeptRun(tmp_path, *RECIPES[recipe])
    assert [recompute(run.config, run.step(step)).status for step in run.steps] == ["exact"] * 4
    with ExitStack() as stack:
        walk = Walk(Rebuilt(run.config, run.step(1).total_steps, stack), run)
        found = [rerun(walk, run.step(step)) for step in (1, 4, 3)]
    assert [(f.status, f.first_difference) for f in found] == [("exact", None)] * 3
    assert found[1].params_digest == run.digest


def test_a_number_that_was_changed_is_named(tmp_path):
    run = KeptRun(tmp_path, steps=2)
    told = run.step(2).rounds[0]
    rows = [replace(row) for row in told.rows]
    rows[3].advantages = np.nextafter(rows[3].advantages, np.float32(9))
    record = replace(run.step(2), rounds=[replace(told, rows=rows)])
    found = recompute(run.config, record)
    assert found.status == "differs" and found.first_difference is not None
    assert (found.first_difference.stage, found.first_difference.tensor) == ("advantages", "advantages")
