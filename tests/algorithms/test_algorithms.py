"""Advantages, losses and aggregation against hand-worked values and autograd."""

import math
import random

import pytest
import torch

from rlctl.algorithms.advantages import grpo
from rlctl.algorithms.aggregation import MODES, token_weights
from rlctl.algorithms.divergence import kl_estimate
from rlctl.algorithms.losses import Tokens, ppo_clip
from rlctl.algorithms.registry import ADVANTAGES, LOSSES
from rlctl.errors import UsageError


def test_grpo_takes_groups_by_id_also_when_one_is_incomplete():
    rewards, groups = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1])
    assert grpo(rewards, groups, normalize_std=False).tolist() == [-1.0, 1.0, 0.0]
    normalised = grpo(rewards, groups).tolist()
    assert normalised == pytest.approx([-1 / (math.sqrt(2) + 1e-6), 1 / (math.sqrt(2) + 1e-6), 0.0], abs=1e-7)
    assert normalised[0] == pytest.approx(-0.7071, abs=1e-4)


def test_grpo_does_not_depend_on_the_order_of_rows():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    torch.manual_seed(seed)
    rewards, groups = torch.rand(40), torch.randint(-3, 5, (40,)) * 7
    order = torch.randperm(40)
    assert torch.allclose(grpo(rewards, groups)[order], grpo(rewards[order], groups[order]), atol=1e-6)
    for number in groups.unique():
        inside = rewards[groups == number]
        if inside.numel() > 1:
            expected = (inside - inside.mean()) / (inside.std() + 1e-6)
            assert torch.allclose(grpo(rewards, groups)[groups == number], expected, atol=1e-4)


def test_equal_rewards_give_no_signal():
    assert grpo(torch.full((6,), 0.7), torch.tensor([1, 1, 1, 2, 2, 2])).abs().max() < 1e-6


def tokens(logprobs, old, advantages, weights=None) -> Tokens:
    count = len(logprobs)
    return Tokens(
        torch.tensor(logprobs, requires_grad=True),
        torch.tensor(old),
        torch.tensor(advantages),
        torch.tensor(weights or [1.0 / count] * count),
        torch.zeros(count, dtype=torch.int64),
    )


def test_ppo_clip_by_hand():
    # ratios 1.5, 0.5, 1.5, 0.5 with advantages +1, +1, -1, -1 and clips 0.2 / 0.28:
    # min(1.5, 1.28) = 1.28; min(.5, .8) = .5; min(-1.5, -1.28) = -1.5; min(-.5, -.8) = -.8
    batch = tokens([math.log(1.5), math.log(0.5)] * 2, [0.0] * 4, [1.0, 1.0, -1.0, -1.0])
    result = ppo_clip(batch, clip_low=0.2, clip_high=0.28)
    assert result.loss.item() == pytest.approx(-(1.28 + 0.5 - 1.5 - 0.8) / 4, abs=1e-6)
    assert result.sums["clip_fraction"].item() == 2.0
    result.loss.backward()
    gradient = batch.logprobs.grad
    # A clipped token has no gradient; the others have -A * ratio / T.
    assert gradient.tolist() == pytest.approx([0.0, -0.5 / 4, 1.5 / 4, 0.0], abs=1e-6)


def test_ppo_clip_on_policy_is_the_policy_gradient_and_survives_an_odd_token():
    batch = tokens([-1.0, -2.0], [-1.0, -2.0], [2.0, -3.0])
    result = ppo_clip(batch)
    result.loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.0, 1.5])
    odd = ppo_clip(tokens([-1.0, 0.0], [-1.0, -1e4], [1.0, -1.0]))
    assert torch.isfinite(odd.loss)


@pytest.mark.parametrize("mode", MODES)
def test_weights_give_the_stated_mean_and_do_not_depend_on_micro_batches(mode):
    lengths = torch.tensor([3, 0, 1, 6])
    weights = token_weights(mode, lengths, horizon=8)
    losses = [torch.rand(int(n), generator=torch.Generator().manual_seed(int(n))) for n in lengths]
    total = sum((w * x.sum()).item() for w, x in zip(weights, losses, strict=True))
    sums = [x.sum().item() for x in losses]
    expected = {
        "token-mean": sum(sums) / 10,
        "seq-mean-token-sum": sum(sums) / 3,
        "seq-mean-token-mean": sum(s / max(int(n), 1) for s, n in zip(sums, lengths, strict=True)) / 3,
        "seq-mean-token-sum-norm": sum(sums) / (3 * 8),
    }[mode]
    assert total == pytest.approx(expected, rel=1e-5)
    assert weights[1] == 0


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ValueError, match="token-mean"):
        token_weights("token_mean", torch.tensor([1]), horizon=1)
    with pytest.raises(UsageError, match="grpo"):
        ADVANTAGES.load("grp")
    with pytest.raises(UsageError, match="ppo_clip"):
        LOSSES.load("ppo-clip")


def test_kl_estimators_agree_with_the_true_divergence_in_the_mean():
    torch.manual_seed(7)
    p, q = torch.softmax(torch.randn(6), 0), torch.softmax(torch.randn(6), 0)
    true = (p * (p / q).log()).sum()
    expected = {k: (p * kl_estimate(p.log(), q.log(), k)).sum() for k in ("k1", "k3")}
    assert expected["k1"] == pytest.approx(true.item(), abs=1e-6)
    assert expected["k3"] == pytest.approx(true.item(), abs=1e-6)
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-0.5]), "k2").item() == pytest.approx(0.125)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(p, q, "k4")
