"""Advantage estimators against hand-worked values and against loops written out in numpy."""

import math

import numpy as np
import pytest
import torch

from rlctl.algorithms.advantages import (
    RewardedBatch,
    group_relative,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from rlctl.algorithms.filtering import has_signal
from rlctl.algorithms.gae import gae
from rlctl.algorithms.registry import ADVANTAGES
from rlctl.algorithms.returns import on_trained_tokens
from rlctl.algorithms.shaping import token_rewards
from rlctl.algorithms.traits import needs_groups, needs_values
from rlctl.errors import UsageError
from tests.algorithms.flat import layout, rewarded, seeded


def test_grpo_takes_groups_by_id_also_when_one_is_incomplete():
    batch = rewarded([1.0, 3.0, 5.0], [0, 0, 1])
    assert grpo(batch, normalize_std=False).advantages.tolist() == [-1.0, 1.0, 0.0]
    normalised = grpo(batch).advantages.tolist()
    assert normalised == pytest.approx([-1 / (math.sqrt(2) + 1e-6), 1 / (math.sqrt(2) + 1e-6), 0.0], abs=1e-7)
    assert normalised[0] == pytest.approx(-0.7071, abs=1e-4)


def test_leave_one_out_by_hand():
    # (1, 2, 6): the others' means are 4, 3.5, 1.5.
    batch = rewarded([1.0, 2.0, 6.0, 9.0], [4, 4, 4, 7])
    assert rloo(batch).advantages.tolist() == [-3.0, -1.5, 4.5, 0.0]
    assert grpo(batch, normalize_std=False, leave_one_out=True).advantages.tolist() == [-3.0, -1.5, 4.5, 0.0]
    std = math.sqrt(7.0)  # sample deviation of 1, 2, 6
    found = grpo(batch, leave_one_out=True).advantages.tolist()
    assert found == pytest.approx([-3.0 / std, -1.5 / std, 4.5 / std, 0.0], abs=1e-6)


def test_group_baselines_do_not_depend_on_the_order_of_rows():
    seeded()
    rewards, groups = torch.rand(40), torch.randint(-3, 5, (40,)) * 7
    order = torch.randperm(40)
    for loo in (False, True):
        found = group_relative(rewards, groups, leave_one_out=loo)
        assert torch.allclose(found[order], group_relative(rewards[order], groups[order], leave_one_out=loo))
        for number in groups.unique():
            inside = rewards[groups == number].double()
            n = inside.numel()
            if n > 1:
                base = (inside.sum() - inside) / (n - 1) if loo else inside.mean()
                assert torch.allclose(found[groups == number], (inside - base) / (inside.std() + 1e-6), atol=1e-12)


def test_equal_rewards_give_no_signal():
    assert grpo(rewarded([0.7] * 6, [1, 1, 1, 2, 2, 2])).advantages.abs().max() < 1e-6
    assert not has_signal([0.7, 0.7, 0.7])
    assert has_signal([0.7, 0.7, 0.8])
    assert not has_signal([1.0])


def numpy_whiten(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)


def numpy_recursion(deltas: list[float], factor: float) -> list[float]:
    out: list[float] = []
    last = 0.0
    for delta in reversed(deltas):
        last = delta + factor * last
        out.append(last)
    return out[::-1]


def random_batch(*, holes: bool) -> RewardedBatch:
    padded = layout()
    row = padded.row
    mask = torch.rand(row.numel()) < 0.7 if holes else torch.ones(row.numel(), dtype=torch.bool)
    return RewardedBatch(
        torch.randn(row.numel(), dtype=torch.float64),
        torch.arange(9) // 3,
        row,
        mask,
        torch.randn(row.numel(), dtype=torch.float64),
    )


def trained(batch: RewardedBatch) -> list[tuple[list[int], list[float], list[float]]]:
    """Return (places, rewards, values) of each response's trained tokens, later rewards folded into earlier tokens."""
    result = []
    for r in range(batch.groups.numel()):
        places, rewards = [], []
        for t in (batch.row == r).nonzero()[:, 0].tolist():
            if batch.mask[t]:
                places.append(t)
                rewards.append(float(batch.token_rewards[t]))
            elif places:
                rewards[-1] += float(batch.token_rewards[t])
        result.append((places, rewards, [float(batch.values[t]) for t in places]))
    return result


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_and_reinforce_pp_equal_loops_written_out(holes, gamma):
    seeded()
    batch = random_batch(holes=holes)
    lam = 0.95
    advantages, discounted = np.zeros(batch.row.numel()), np.zeros(batch.row.numel())
    returns = np.zeros(batch.row.numel())
    for places, rewards, values in trained(batch):
        after = [*values, 0.0][1:]
        deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
        advantages[places] = numpy_recursion(deltas, gamma * lam)
        returns[places] = advantages[places] + values
        discounted[places] = numpy_recursion(rewards, gamma)
    mask = batch.mask.numpy()
    plain = gae(batch, gamma=gamma, lam=lam, whiten_advantages=False)
    assert np.abs(plain.advantages.numpy() - advantages).max() < 1e-6
    assert np.abs(plain.returns.numpy() - returns).max() < 1e-6
    whitened = gae(batch, gamma=gamma, lam=lam)
    assert np.abs(whitened.advantages.numpy()[mask] - numpy_whiten(advantages[mask])).max() < 1e-6
    assert (whitened.returns == plain.returns).all()
    found = reinforce_pp(batch, gamma=gamma).advantages.numpy()
    assert np.abs(found[mask] - numpy_whiten(discounted[mask])).max() < 1e-6
    for value in (plain.advantages, plain.returns, whitened.advantages):
        assert (value.numpy()[~mask] == 0).all()
    assert (found[~mask] == 0).all()


def test_gae_by_hand():
    # V = 0.5, 0.25; r = 0, 1; gamma 1, lambda 0.5: d2 = 0.75, d1 = -0.25; A = (0.125, 0.75), R = (0.625, 1).
    batch = RewardedBatch(
        torch.tensor([0.0, 1.0], dtype=torch.float64),
        torch.tensor([0]),
        torch.tensor([0, 0]),
        torch.tensor([True, True]),
        torch.tensor([0.5, 0.25]),
    )
    found = gae(batch, lam=0.5, whiten_advantages=False)
    assert found.advantages.tolist() == [0.125, 0.75]
    assert found.returns is not None
    assert found.returns.tolist() == [0.625, 1.0]


def test_gae_with_lambda_one_and_no_values_is_the_return():
    seeded()
    batch = random_batch(holes=True)
    zero = RewardedBatch(
        batch.token_rewards, batch.groups, batch.row, batch.mask, torch.zeros_like(batch.token_rewards)
    )
    found = gae(zero, gamma=0.9, whiten_advantages=False).advantages[batch.mask].double().numpy()
    assert np.abs(numpy_whiten(found) - reinforce_pp(batch, gamma=0.9).advantages[batch.mask].numpy()).max() < 1e-5


def test_gae_without_values_is_refused_with_the_fix():
    with pytest.raises(UsageError, match=r"algorithm\.critic\.model=actor"):
        gae(rewarded([1.0], [0]))


def test_reinforce_pp_baseline_by_hand():
    # rewards 1, 0 | 0, 0 with lengths 2, 1, 1, 1: centred .5 .5 -.5 0 0, mean .1, sample variance .175
    found = reinforce_pp_baseline(rewarded([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], [2, 1, 1, 1])).advantages.tolist()
    std = math.sqrt(0.175 + 1e-8)
    assert found == pytest.approx([0.4 / std, 0.4 / std, -0.6 / std, -0.1 / std, -0.1 / std], abs=1e-6)


def test_rewards_of_untrained_tokens_go_to_the_trained_one_before():
    row = torch.tensor([0, 0, 0, 1, 1, 2])
    mask = torch.tensor([True, False, False, False, True, False])
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert on_trained_tokens(rewards, row, mask).tolist() == [7.0, 0.0, 0.0, 0.0, 16.0, 0.0]


def test_a_response_that_is_not_trained_still_counts_in_its_groups_baseline():
    batch = rewarded([1.0, 0.0], [0, 0], [2, 2])
    masked = RewardedBatch(batch.token_rewards, batch.groups, batch.row, torch.tensor([True, True, False, False]))
    assert rloo(masked).advantages.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_kl_in_the_reward_lowers_the_rewards_of_its_tokens():
    row = torch.tensor([0, 0, 1])
    kl = torch.tensor([0.5, 1.0, 2.0])
    found = token_rewards(torch.tensor([1.0, 0.0]), row, kl=kl, kl_coef=0.1, mask=torch.tensor([True, True, False]))
    assert found.tolist() == pytest.approx([-0.05, 0.9, 0.0], abs=1e-7)
    assert token_rewards(torch.tensor([1.0, 3.0]), row).tolist() == [0.0, 1.0, 3.0]


def test_a_stranger_adds_an_estimator_and_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(ADVANTAGES, "_registered", {})

    def mine(batch: RewardedBatch, *, gamma: float = 1.0) -> None: ...

    mine.needs_values = True
    ADVANTAGES.register("of-a-test", mine)
    assert ADVANTAGES.load("of-a-test") is mine
    assert needs_values("of-a-test")
    assert needs_groups("of-a-test")
    assert {name for name in ADVANTAGES.names() if needs_values(name)} == {"gae", "of-a-test"}
    with pytest.raises(UsageError, match="grpo"):
        ADVANTAGES.load("grp")
