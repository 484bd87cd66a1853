"""Losses, aggregation, divergences and the value loss against hand-worked values and independent references."""

import math

import pytest
import torch

from rlctl.algorithms.aggregation import MODES, token_weights
from rlctl.algorithms.divergence import KlCoefficient, kl_estimate
from rlctl.algorithms.losses import LossResult, Tokens, cispo, gspo, ppo_clip, reinforce
from rlctl.algorithms.objective import Objective
from rlctl.algorithms.options import options_of
from rlctl.algorithms.registry import LOSSES
from rlctl.algorithms.value_loss import value_loss
from rlctl.errors import UsageError
from tests.algorithms.flat import layout, random_tokens, seeded


def tokens(logprobs, old, advantages, weights=None, row=None) -> Tokens:
    count = len(logprobs)
    return Tokens(
        torch.tensor(logprobs, requires_grad=True),
        torch.tensor(old),
        torch.tensor(advantages),
        torch.tensor(weights or [1.0 / count] * count),
        torch.tensor(row or [0] * count),
    )


def test_ppo_clip_by_hand():
    # ratios 1.5, 0.5, 1.5, 0.5 with advantages +1, +1, -1, -1 and clips 0.2 / 0.28:
    # min(1.5, 1.28) = 1.28; min(.5, .8) = .5; min(-1.5, -1.28) = -1.5; min(-.5, -.8) = -.8
    batch = tokens([math.log(1.5), math.log(0.5)] * 2, [0.0] * 4, [1.0, 1.0, -1.0, -1.0])
    result = ppo_clip(batch, clip_low=0.2, clip_high=0.28)
    assert result.loss.item() == pytest.approx(-(1.28 + 0.5 - 1.5 - 0.8) / 4, abs=1e-6)
    assert result.sums["clip_fraction"].item() == 2.0
    result.loss.backward()
    # A clipped token has no gradient; the others have -A * ratio / T.
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, -0.5 / 4, 1.5 / 4, 0.0], abs=1e-6)


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    # ratios 5 and 2 with A = -1: losses 5 and 2, bounded by c = 3; with A = +1 nothing changes.
    logs = [math.log(5.0), math.log(2.0)]
    batch = tokens(logs, [0.0, 0.0], [-1.0, -1.0])
    result = ppo_clip(batch, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert result.loss.item() == pytest.approx((3.0 + 2.0) / 2, abs=1e-6)
    assert result.sums["dual_clip_fraction"].item() == 1.0
    result.loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
    good = [ppo_clip(tokens(logs, [0.0, 0.0], [1.0, 1.0]), dual_clip=c).loss.item() for c in (None, 3.0)]
    assert good[0] == good[1]


def test_gspo_by_hand():
    # Log ratios (0.2, 0.4) and (-0.9): the sequences' ratios are e^0.3 (clipped at 1.2 for A = 1) and e^-0.9.
    batch = tokens([-1.0, -1.0, -1.0], [-1.2, -1.4, -0.1], [1.0, 1.0, -2.0], [0.25, 0.25, 0.5], [0, 0, 1])
    result = gspo(batch, clip_low=0.7, clip_high=0.5)
    assert result.loss.item() == pytest.approx(-0.5 * math.exp(0.3) + 0.5 * 2 * math.exp(-0.9), abs=1e-6)
    result.loss.backward()
    expected = [-0.25 * math.exp(0.3), -0.25 * math.exp(0.3), math.exp(-0.9)]
    assert batch.logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)
    assert gspo(batch, clip_low=0.2, clip_high=0.2).loss.item() == pytest.approx(-0.6 + 0.8, abs=1e-6)


def test_cispo_by_hand_keeps_every_gradient():
    batch = tokens([math.log(5.0), math.log(0.1)], [0.0, 0.0], [1.0, -1.0])
    result = cispo(batch, clip_low=0.2, clip_high=0.28)
    assert result.loss.item() == pytest.approx(-(1.28 * math.log(5.0) - 0.8 * math.log(0.1)) / 2, abs=1e-6)
    assert result.sums["clip_fraction"].item() == 2.0
    result.loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.28 / 2, 0.8 / 2], abs=1e-6)
    open_below = tokens([math.log(0.1)], [0.0], [-1.0])
    assert cispo(open_below, clip_low=1.0).loss.item() == pytest.approx(0.1 * math.log(0.1), abs=1e-6)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "reinforce"])
def test_on_policy_every_loss_has_the_gradient_of_the_policy_and_survives_an_odd_token(name):
    loss = LOSSES.load(name)
    batch = tokens([-1.0, -2.0], [-1.0, -2.0], [2.0, -3.0])
    loss(batch).loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.0, 1.5])
    odd = loss(tokens([-1.0, 0.0], [-1.0, -1e4], [1.0, -1.0]))
    assert torch.isfinite(odd.loss)
    assert all(torch.isfinite(value) for value in odd.sums.values())


@pytest.mark.parametrize("loss", [ppo_clip, gspo, cispo, reinforce])
def test_correction_weights_multiply_the_loss_of_their_token(loss):
    seeded()
    padded = layout()
    batch = random_tokens(padded, torch.full((9,), 0.1))
    plain = [
        loss(Tokens(**{**vars(batch), "weights": batch.weights * (torch.arange(batch.row.numel()) == t)})).loss
        for t in range(batch.row.numel())
    ]
    batch.importance = torch.rand(batch.row.numel())
    expected = sum(float(w) * value.item() for w, value in zip(batch.importance, plain, strict=True))
    assert loss(batch).loss.item() == pytest.approx(expected, abs=1e-5)


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


def test_the_kl_coefficient_moves_towards_its_target_and_comes_back_from_a_checkpoint():
    fixed, steered = KlCoefficient(0.1), KlCoefficient(0.1, target=1.0, horizon=100.0)
    fixed.update(9.0, 10)
    assert fixed.value == 0.1
    steered.update(1.1, 10)  # error 0.1 within the clip
    assert steered.value == pytest.approx(0.1 * 1.01)
    steered.update(50.0, 10)  # clipped at 0.2
    assert steered.value == pytest.approx(0.1 * 1.01 * 1.02)
    steered.update(0.0, 10)
    assert steered.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    again = KlCoefficient(0.5, target=1.0)
    again.load(steered.state())
    assert again.value == steered.value


def test_the_objective_is_the_sum_of_its_terms():
    seeded()
    weights = token_weights("token-mean", layout().mask.sum(1), horizon=12)
    batch = random_tokens(layout(9), weights)
    base = Objective("ppo_clip")(batch).loss
    kl = (kl_estimate(batch.logprobs, batch.ref_logprobs, "k2") * batch.weights).sum()
    entropy = (batch.entropy * batch.weights).sum()
    objective = Objective("ppo_clip", kl="k2", kl_coef=0.3, entropy_coef=0.02)
    result = objective(batch)
    assert result.loss.item() == pytest.approx((base + 0.3 * kl - 0.02 * entropy).item(), abs=1e-6)
    assert result.sums["entropy"].item() == pytest.approx(batch.entropy.sum().item(), rel=1e-6)
    result.loss.backward()
    assert torch.allclose(batch.entropy.grad, -0.02 * batch.weights)


def test_value_loss_by_hand():
    # v - R = (0.5, 3), clipped at 0.2 from old = R: errors max(.25, .04), max(9, .04).
    values = torch.tensor([1.5, 4.0], requires_grad=True)
    old, returns = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])
    result = value_loss(values, old, returns, torch.tensor([0.5, 0.5]), clip=0.2)
    assert result.loss.item() == pytest.approx((0.25 + 9.0) / 4, abs=1e-6)
    # Moving towards the target further than the clip is no longer rewarded: v from 0 to 0.5, R = 1.
    clipped = value_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), torch.ones(1), clip=0.2)
    assert clipped.loss.item() == pytest.approx(0.8**2 / 2, abs=1e-6)
    assert clipped.sums["critic/clip_fraction"].item() == 1.0
    plain = value_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), torch.ones(1), clip=None)
    assert plain.loss.item() == pytest.approx(0.125, abs=1e-6)


def test_a_stranger_adds_a_loss_and_gets_the_settings_that_it_names(monkeypatch):
    monkeypatch.setattr(LOSSES, "_registered", {})

    def mine(tokens: Tokens, *, clip_high: float, dual_clip: float | None = None) -> LossResult:
        return LossResult(tokens.logprobs.sum() * clip_high, {})

    LOSSES.register("of-a-test", mine)
    settings = {"clip_low": 0.1, "clip_high": 2.0, "dual_clip": 3.0}
    assert options_of(mine, settings) == {"clip_high": 2.0, "dual_clip": 3.0}
    found = Objective("of-a-test", options=settings)(tokens([-1.0], [-1.0], [1.0]))
    assert found.loss.item() == -2.0
