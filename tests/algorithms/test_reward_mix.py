"""Rewards out of the task's and a reward model's, against cases worked by hand."""

import math
import random

import numpy as np
import pytest

from rlctl.algorithms.reward_mix import mix_rewards
from rlctl.schema.reward_model import RewardModelConfig


def mixed(task: list[float], scores: list[float], **settings: object) -> tuple[list[float], dict[str, float]]:
    found = mix_rewards(np.array(task), np.array(scores), RewardModelConfig("rm", **settings))  # type: ignore[arg-type]
    return found.rewards.tolist(), found.metrics


def test_weights_count_both() -> None:
    rewards, metrics = mixed([1, 0, 1], [2, -1, 0.5], weight=0.5, task_weight=2)
    assert rewards == pytest.approx([3, -0.5, 2.25])
    assert metrics["reward/task"] == pytest.approx(4 / 3)
    assert metrics["task_reward"] == pytest.approx(2 / 3)
    assert metrics["reward/model"] == pytest.approx(0.25)
    assert (metrics["reward_model/min"], metrics["reward_model/max"]) == (-1, 2)
    assert metrics["reward_model/std"] == pytest.approx(math.sqrt((1.5**2 + 1.5**2 + 0) / 3))


def test_a_negative_weight_takes_off_and_a_task_weight_of_0_leaves_the_scores() -> None:
    assert mixed([1, 0], [3, 4], weight=-1, task_weight=0)[0] == [-3, -4]


def test_sigmoid_is_a_probability_also_far_out() -> None:
    rewards, _ = mixed([0] * 4, [0, math.log(3), -2000, 2000], normalize="sigmoid")
    assert rewards == pytest.approx([0.5, 0.75, 0, 1])


def test_a_batch_has_mean_0_and_deviation_1_and_equal_scores_are_0() -> None:
    assert mixed([0, 0], [1, 3], normalize="batch")[0] == pytest.approx([-1, 1], abs=2e-6)
    assert mixed([0, 0, 0], [7, 7, 7], normalize="batch")[0] == [0, 0, 0]


def test_the_clip_comes_after_the_normalisation_and_before_the_weight() -> None:
    rewards, metrics = mixed([0] * 4, [-9, 2, 0.5, 9], weight=10, clip=2)
    assert rewards == [-20, 20, 5, 20]
    assert metrics["reward_model/clipped"] == 0.5
    assert mixed([0] * 2, [-50, 50], normalize="sigmoid", clip=0.9)[0] == pytest.approx([0, 0.9])


@pytest.mark.parametrize("normalize", ["none", "sigmoid", "batch"])
def test_the_parts_make_the_whole(normalize: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    task, scores = rng.integers(0, 2, 33).astype(np.float64), rng.normal(0, 30, 33)
    weights = {"weight": float(rng.normal()), "task_weight": float(rng.random()), "clip": float(rng.random() * 9 + 0.1)}
    rewards, metrics = mixed(task.tolist(), scores.tolist(), normalize=normalize, **weights)
    assert np.mean(rewards) == pytest.approx(metrics["reward/task"] + metrics["reward/model"])
    order = np.argsort(scores * weights["weight"])
    alone = np.array(mixed([0] * 33, scores.tolist(), normalize=normalize, **weights)[0])
    assert (np.diff(alone[order]) >= -1e-12).all()
