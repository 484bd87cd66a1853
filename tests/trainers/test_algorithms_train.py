"""Algorithms end to end: real model, real engine. Equal runs give equal bits, and each part does what it is for."""

import math
import shutil
from pathlib import Path

import pytest

from rlctl.algorithms.advantages import Advantages, RewardedBatch
from rlctl.algorithms.losses import LossResult, Tokens
from rlctl.algorithms.registry import ADVANTAGES, LOSSES
from rlctl.errors import RlctlError, UsageError
from rlctl.model.loading import load_model
from rlctl.tasks.builtin_models import builtin_model_path
from tests.trainers.sessions import Run

CORRECTION = "algorithm.rollout_correction"
RECIPES = {
    "rloo": ["algorithm.preset=rloo"],
    "gae": ["algorithm.preset=ppo", "algorithm.lam=0.95"],
    "kl-loss": ["algorithm.kl.place=loss", "algorithm.kl.coef=0.1"],
    "kl-reward": ["algorithm.kl.place=reward", "algorithm.kl.estimator=k1", "algorithm.kl.target=0.05"],
    "entropy": ["algorithm.entropy_coef=0.01", "algorithm.loss=gspo", "algorithm.advantage=reinforce_pp"],
    "decoupled": [f"{CORRECTION}.preset=decoupled_geo_rs_token_tis"],
    "filter": ["algorithm.filter_groups=true"],
    "bypass": [f"{CORRECTION}.preset=bypass_pg_is"],
}
BASIC = "basic"


@pytest.fixture(scope="module")
def basic(tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp(BASIC))


@pytest.mark.parametrize("name", RECIPES)
def test_equal_runs_give_equal_bits_and_the_recipe_makes_a_difference(name: str, tmp_path: Path, basic: Run) -> None:
    first, second = Run(tmp_path / "a", *RECIPES[name]), Run(tmp_path / "b", *RECIPES[name])
    assert first.digests == second.digests
    assert first.digests[0] != basic.digests[0]
    assert all(math.isfinite(value) for metrics in first.metrics for value in metrics.values())
    for metrics in (*first.metrics, *basic.metrics):
        assert {"rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/ppl_ratio", "logprob_gap"} <= metrics.keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["rloo", "gae", "kl-loss", "kl-reward", "filter"])
def test_twenty_steps_give_equal_bits(name: str, tmp_path: Path) -> None:
    sizes = ["trainer.prompts_per_step=16", "trainer.mini_batch_prompts=16", "rollout.samples_per_prompt=8"]
    runs = [Run(tmp_path / part, *sizes, *RECIPES[name], steps=20) for part in "ab"]
    print(name, "digest", runs[0].digests)
    assert runs[0].digests == runs[1].digests
    assert len(runs[0].metrics) == 20
    assert runs[0].metrics[-1]["reward"] > runs[0].metrics[0]["reward"]


def test_the_critic_learns_and_is_resumed_with_the_actor(tmp_path: Path) -> None:
    recipe = [*RECIPES["gae"], "algorithm.critic.lr=1e-3"]
    whole = Run(tmp_path / "whole", *recipe, steps=4)
    Run(tmp_path / "parts", *recipe, steps=2)
    rest = Run(tmp_path / "parts", *recipe, steps=4, resume=True)
    assert rest.digests == whole.digests
    assert [m["reward"] for m in rest.metrics] == [m["reward"] for m in whole.metrics[2:]]
    assert whole.metrics[0]["critic/value"] != whole.metrics[-1]["critic/value"]
    assert all(metrics["critic/grad_norm"] > 0 for metrics in whole.metrics)


def test_a_run_that_replaces_groups_and_steers_its_kl_is_resumed(tmp_path: Path) -> None:
    recipe = [*RECIPES["filter"], *RECIPES["kl-reward"]]
    whole = Run(tmp_path / "whole", *recipe, steps=3)
    Run(tmp_path / "parts", *recipe, steps=1)
    assert Run(tmp_path / "parts", *recipe, steps=3, resume=True).digests == whole.digests


def test_the_critic_is_warmed_up_before_the_actor_moves(tmp_path: Path) -> None:
    recipe = [*RECIPES["gae"], "algorithm.critic.warmup_steps=1"]
    runs = [Run(tmp_path / str(steps), *recipe, steps=steps) for steps in (1, 2)]
    still = Run(tmp_path / "still", *recipe, "trainer.optimizer.lr=0", "algorithm.critic.lr=0")
    assert runs[0].digests[0] == still.digests[0] != runs[1].digests[0]
    assert still.digests[1] != runs[0].digests[1] != runs[1].digests[1]


def test_a_strong_kl_holds_the_policy_and_a_target_steers_it(tmp_path: Path, basic: Run) -> None:
    lr = "trainer.optimizer.lr=1e-3"
    free, held = (
        Run(tmp_path / str(coef), lr, "algorithm.kl.place=loss", f"algorithm.kl.coef={coef}", steps=4)
        for coef in (1e-9, 10)
    )
    assert held.metrics[-1]["kl_loss"] < free.metrics[-1]["kl_loss"] / 3
    steered = Run(tmp_path / "s", *RECIPES["kl-reward"], "algorithm.kl.horizon=100", steps=2)
    # The policy starts on its reference, so the weight falls by 0.2 * 16 / 100 at first.
    assert steered.metrics[1]["kl_coef"] == pytest.approx(0.001 * (1 - 0.2 * 16 / 100), rel=1e-6)
    again = Run(tmp_path / "s", *RECIPES["kl-reward"], "algorithm.kl.horizon=100", steps=2, resume=True)
    assert again.kl_coef == steered.kl_coef


def test_a_checkpoint_without_the_critic_cannot_be_gone_on_with_by_gae(tmp_path: Path) -> None:
    Run(tmp_path, steps=1)
    with pytest.raises(RlctlError, match="no state of: critic"):
        Run(tmp_path, *RECIPES["gae"], steps=2, resume=True)


def test_reference_and_critic_may_be_folders_whose_vocabulary_is_the_actors(tmp_path: Path) -> None:
    kl, gae = [*RECIPES["kl-loss"], "algorithm.kl.reference={}"], [*RECIPES["gae"], "algorithm.critic.model={}"]
    copied, named = Run(tmp_path / "a", *gae[:-1]), Run(tmp_path / "b", *(word.format("cycle-tiny") for word in gae))
    assert copied.digests == named.digests
    foreign = tmp_path / "foreign"
    source = builtin_model_path("cycle-tiny")
    assert source is not None
    shutil.copytree(source, foreign)
    loaded = load_model(str(foreign), trust_remote_code=False)
    loaded.tokenizer.add_tokens(["<other>"])
    loaded.tokenizer.save_pretrained(foreign)
    for recipe, key in ((kl, "algorithm.kl.reference"), (gae, "algorithm.critic.model")):
        for folder, message in ((foreign, "vocabulary"), (tmp_path / "nowhere", "does not exist")):
            with pytest.raises(UsageError, match=message) as caught:
                Run(tmp_path / "c", *(word.format(folder) for word in recipe))
            assert caught.value.where == key


def test_rejected_responses_are_not_trained(tmp_path: Path) -> None:
    # The engine's log-probs are the trainer's to 1e-6, so a bound of less rejects nearly all.
    tight = f"{CORRECTION}.rollout_rs_threshold=1e-16"
    run = Run(tmp_path, f"{CORRECTION}.rollout_rs=token_k2", tight, steps=1)
    share = run.metrics[0]["rollout_corr/rollout_rs_masked_fraction"]
    assert 0.3 < share < 1.0


def test_a_strangers_estimator_and_loss_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, basic: Run) -> None:
    def batch_mean(batch: RewardedBatch) -> Advantages:
        centred = batch.scores - batch.scores.mean()
        return Advantages((centred[batch.row] * batch.mask).float())

    def ratio_only(tokens: Tokens, *, clip_high: float) -> LossResult:
        ratio = (tokens.logprobs - tokens.old_logprobs).exp().clamp(max=1 + clip_high)
        return LossResult(-(ratio * tokens.advantages * tokens.weights).sum(), {})

    monkeypatch.setattr(ADVANTAGES, "_registered", {"batch_mean": batch_mean})
    monkeypatch.setattr(LOSSES, "_registered", {"ratio_only": ratio_only})
    run = Run(tmp_path, "algorithm.advantage=batch_mean", "algorithm.loss=ratio_only")
    assert run.digests != basic.digests
    assert all(metrics["grad_norm"] > 0 for metrics in run.metrics)
