"""Training on conversations: what the model was told is nobody's doing, in every algorithm. Real runs, and rows."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rlctl.algorithms.registry import ADVANTAGES
from rlctl.errors import RlctlError
from rlctl.experience.events import Dispatched, SegmentMade
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.ops.resolve import resolve
from rlctl.tasks.registry import TASKS
from rlctl.tasks.two_turn import TwoTurnTask
from rlctl.trainers.algorithm import Algorithm
from rlctl.trainers.credit import assign_credit, measure_mismatch
from tests.trainers.sessions import Run

TWO_TURN = "task.name=two_turn"
CORRECTION = "algorithm.rollout_correction"


def make_rows(seed: int) -> list[Row]:
    """Return eight conversations of two prompts; where the model was told something, nothing is a number."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(8):
        turns, end = [], 0
        for _ in range(rng.integers(1, 4)):
            begin = end + (int(rng.integers(1, 4)) if turns else 0)
            end = begin + int(rng.integers(1, 6))
            turns.append((begin, end))
        row = Row(
            key=RequestKey(number // 4, number % 4, len(turns) - 1), group=number // 4, prompt_ids=[1, 2],
            response_ids=rng.integers(0, 9, end).tolist(), reward=float(rng.integers(0, 3)),
            rollout_logprobs=np.zeros(0, np.float32), versions=np.zeros(end, np.int64), turns=turns,
        )  # fmt: skip
        for column in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values"):
            values = -rng.random(end).astype(np.float32)
            values[~row.sampled] = np.nan
            setattr(row, column, values)
        rows.append(row)
    return rows


def without_observations(row: Row) -> Row:
    """Return the row of a response that has the model's tokens alone."""
    kept = row.sampled
    arrays = {name: getattr(row, name)[kept] for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")}
    ids = [token for token, keep in zip(row.response_ids, kept, strict=True) if keep]
    none = np.zeros(0, np.bool_)
    return dataclasses.replace(row, response_ids=ids, versions=row.versions[kept], turns=[], mask=none, **arrays)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "words",
    [
        *([f"algorithm.advantage={name}"] for name in ADVANTAGES.names()),
        ["algorithm.advantage=gae", "algorithm.gamma=0.9", "algorithm.lam=0.8", "algorithm.kl.place=reward"],
        ["algorithm.kl.place=reward", "algorithm.kl.coef=0.5", "algorithm.kl.estimator=k1"],
        [f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_batch_normalize=true"],
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_rs=token_k1",
         f"{CORRECTION}.rollout_rs_threshold=0.7_1.4"],
        [f"{CORRECTION}.rollout_rs=seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold=0.1"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_credit_is_that_of_the_models_tokens_alone(words: list[str], seed: int) -> None:
    config = resolve(env={}, overrides=words).config
    whole, alone = make_rows(seed), [without_observations(row) for row in make_rows(seed)]
    metrics = [assign_credit(rows, Algorithm(config)) for rows in (whole, alone)]
    assert metrics[0] == pytest.approx(metrics[1])
    for row, short in zip(whole, alone, strict=True):
        for name in ("advantages", "returns", "importance", "mask"):
            mine, other = getattr(row, name), getattr(short, name)
            assert (mine is None) == (other is None)
            if mine is not None:
                np.testing.assert_allclose(mine[row.sampled], other, rtol=1e-6)
        assert not row.mask[~row.sampled].any()
        assert (row.advantages[~row.sampled] == 0).all()
    mismatch = [
        measure_mismatch(rows, [row.old_logprobs for row in rows if row.old_logprobs is not None], Algorithm(config))
        for rows in (whole, alone)
    ]
    assert mismatch[0] == pytest.approx(mismatch[1])


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.old_log_probs=rollout"],
        ["algorithm.kl.place=reward", "algorithm.entropy_coef=0.01", "algorithm.aggregation=seq-mean-token-mean"],
        ["algorithm.kl.place=loss", "trainer.old_log_probs=rollout", f"{CORRECTION}.rollout_rs=token_k1",
         f"{CORRECTION}.rollout_rs_threshold=0.5_2", "algorithm.loss=reinforce", f"{CORRECTION}.rollout_is=token",
         f"{CORRECTION}.rollout_is_batch_normalize=true"],
        ["algorithm.advantage=gae", "algorithm.critic.model=actor", "algorithm.loss=gspo",
         "algorithm.overlong_responses=mask", "rollout.max_new_tokens=8"],
    ],
    ids=["bypass", "kl-in-reward", "corrected-bypass", "critic"],
)  # fmt: skip
def test_nothing_that_was_told_reaches_an_update(words: list[str], tmp_path: Path) -> None:
    # Log-probs of observations are NaN: whatever used one would show it.
    run = Run(tmp_path, TWO_TURN, *words, steps=1)
    metrics = run.metrics[0]
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["turns"] > 1
    assert metrics["observation_tokens"] > 0
    assert metrics["skipped_updates"] == 0
    assert metrics["grad_norm"] > 0
    told = sum(event.tokens for event in run.events if isinstance(event, SegmentMade) and event.observation)
    assert metrics["observation_tokens"] == pytest.approx(told / 16)
    assert metrics["generated_tokens"] == pytest.approx(metrics["response_tokens"] * 16 - told)


def test_a_conversation_that_has_no_room_is_cut_and_goes_by_the_policy(tmp_path: Path) -> None:
    # 2 tokens of a guess, 3 of the answer to it: no room for another guess.
    run = Run(tmp_path, TWO_TURN, "rollout.max_new_tokens=5", "algorithm.overlong_responses=drop", steps=1)
    metrics = run.metrics[0]
    assert metrics["truncated"] > 0.5
    assert metrics["overlong_dropped"] == metrics["truncated"] * 16
    assert "turns" not in metrics


def test_a_step_of_the_wrong_type_ends_the_run(tmp_path: Path) -> None:
    class Broken(TwoTurnTask):
        name = "broken"

        def step(self, sample, messages):  # type: ignore[no-untyped-def]
            return "+3", 0.0

    TASKS.register("broken", Broken)
    with pytest.raises(RlctlError, match="step of task 'broken' returned tuple"):
        Run(tmp_path, "task.name=broken", "run.validate_prompts=0", steps=1)


WORDS = {
    "alone": TWO_TURN,
    "mixed": "task.mixture=[{name: cycle, weight: 1}, {name: two_turn, weight: 3}]",
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [("mixed", 2), *(pytest.param(name, 20, marks=pytest.mark.slow) for name in WORDS)],
)
@pytest.mark.timeout(600)
def test_equal_runs_give_equal_bits_also_when_they_go_on(name: str, steps: int, tmp_path: Path) -> None:
    whole = [Run(tmp_path / part, WORDS[name], steps=steps) for part in "ab"]
    Run(tmp_path / name, WORDS[name], steps=steps // 2)
    gone_on = Run(tmp_path / name, WORDS[name], steps=steps, resume=True)
    print(name, "digest", whole[0].digests)
    assert whole[0].digests == whole[1].digests == gone_on.digests
    assert len(gone_on.metrics) == steps - steps // 2
    if name == "mixed":
        tasks = [event.task for event in whole[0].events if isinstance(event, Dispatched)]
        assert tasks == ["cycle", "two_turn", "two_turn", "two_turn"] * steps
