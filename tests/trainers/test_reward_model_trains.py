"""Runs with a reward model: equal again bit for bit, resumed too, wherever it computes; its part is told apart."""

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rlctl.errors import UnavailableError, UsageError
from rlctl.experience.events import Finished, Scored
from rlctl.model.reward.loading import load_classifier
from rlctl.model.reward.local import LocalRewardModel
from rlctl.model.reward.pool import RewardPool
from rlctl.model.reward.serving import Settings
from rlctl.trainers.step import STAGES
from tests.model.tiny_reward import save_reward_model
from tests.trainers.sessions import Run

MIX = [
    "reward_model.weight=0.5", "reward_model.normalize=batch", "reward_model.clip=2", "rollout.max_new_tokens=8",
    "trainer.mini_batch_prompts=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward") / "rm")


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("twenty")
    return Run(folder, f"reward_model.path={model}", *MIX, "run.checkpoint_every=10", steps=20), folder


def test_twenty_steps_are_equal_again_and_the_parts_make_the_reward(
    twenty: tuple[Run, Path], model: Path, tmp_path: Path
) -> None:
    first, _ = twenty
    again = Run(tmp_path / "a", f"reward_model.path={model}", *MIX, steps=20)
    assert again.digests == first.digests
    scored = [event for event in first.events if isinstance(event, Scored)]
    rewards = {(e.ordinal, e.sample): e.reward for e in first.events if isinstance(e, Finished)}
    assert len(scored) == len(first.metrics) == 20
    for event, metrics in zip(scored, first.metrics, strict=True):
        assert metrics["reward"] == pytest.approx(metrics["reward/task"] + metrics["reward/model"])
        assert metrics["reward"] == pytest.approx(sum(event.rewards) / len(event.rewards))
        assert metrics["reward_model/mean"] == pytest.approx(sum(event.scores) / len(event.scores))
        assert [rewards[ordinal, sample] for ordinal, sample, _ in event.keys] == event.task
        assert len(set(event.scores)) > 1
        assert metrics["reward_model/overlong"] == 0
        assert 0 < metrics["reward_model/seconds"] <= metrics["seconds_reward"]
    assert len(STAGES) == 10


def test_resumed_from_the_middle_it_ends_with_the_same_bits(
    twenty: tuple[Run, Path], model: Path, tmp_path: Path
) -> None:
    first, folder = twenty
    (tmp_path / "ckpt").mkdir()
    (folder / "ckpt" / "step_10").rename(tmp_path / "ckpt" / "step_10")
    resumed = Run(tmp_path, f"reward_model.path={model}", *MIX, steps=20, resume=True)
    assert len(resumed.metrics) == 10
    assert resumed.digests == first.digests


def test_a_task_weight_of_0_learns_from_the_scores_alone(model: Path, tmp_path: Path) -> None:
    alone = Run(tmp_path, f"reward_model.path={model}", "reward_model.task_weight=0", "reward_model.dtype=bfloat16")
    for metrics in alone.metrics:
        assert metrics["reward/task"] == 0
        assert metrics["reward"] == pytest.approx(metrics["reward/model"])
        assert metrics["grad_norm"] > 0


def test_prompts_without_answers_are_judged_by_the_model_alone(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1+2c"}) + "\n" for n in range(9)))
    words = [f"task.name={data}", "task.verifier=none", "task.held_out=0", "run.validate_prompts=0"]
    run = Run(tmp_path, *words, f"reward_model.path={model}", steps=1)
    assert run.metrics[0]["task_reward"] == 0
    assert run.metrics[0]["reward"] == pytest.approx(run.metrics[0]["reward/model"])
    assert run.metrics[0]["grad_norm"] > 0


@pytest.mark.parametrize("kills", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_of_the_pool_scores_as_here_and_one_that_is_killed_is_started_again(model: Path, kills: int) -> None:
    sequences = [[5, 6, 7], [8], [9, 10, 11, 12], [7] * 9]
    loaded = load_classifier(str(model), dtype="float32", output=None, trust_remote_code=False)
    here = LocalRewardModel(loaded, output=None, micro_batch_tokens=12).scores(sequences)
    pool = RewardPool([Settings(str(model), "float32", None, False, "cpu", 1, 60.0)], micro_batch_tokens=12, timeout=60)
    try:
        assert (pool.scores(sequences) == here).all()
        for _ in range(kills):
            pid = pool._children[0].pid
            os.kill(pid, signal.SIGKILL)
            assert (pool.scores(sequences) == here).all()
            assert pool._children[0].pid != pid
    finally:
        pool.close()


@pytest.mark.slow
def test_a_pool_of_its_own_gives_the_same_bits(model: Path, tmp_path: Path) -> None:
    runs = [
        Run(tmp_path / str(pool), f"reward_model.path={model}", *MIX, *devices)
        for pool, devices in enumerate(([], ["placement.reward_devices=2", "cluster.devices_per_node=3"]))
    ]
    assert runs[0].digests == runs[1].digests


@pytest.mark.slow
def test_what_the_pool_cannot_load_is_told_as_here(tmp_path: Path) -> None:
    headless = save_reward_model(tmp_path / "headless")
    weights = load_file(headless / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    for devices in ([], ["placement.reward_devices=1", "cluster.devices_per_node=2"]):
        with pytest.raises(UsageError, match=r"no weights for score\.weight") as caught:
            Run(tmp_path, f"reward_model.path={headless}", *devices)
        assert caught.value.where == "reward_model.path"


def test_a_pool_on_another_node_is_not_built(model: Path, tmp_path: Path) -> None:
    far = ["placement.reward_devices=1", "cluster.nodes=2", "cluster.links.interface=lo"]
    with pytest.raises(UnavailableError, match="on node 1"):
        Run(tmp_path, f"reward_model.path={model}", *far)
