"""Rollout correction: hand-worked values, the behaviours that users rely on, references written out in numpy."""

import math

import numpy as np
import pytest
import torch

from rlctl.algorithms.correction.apply import LogProbsError, correct
from rlctl.algorithms.correction.settings import OPTIONS, Correction, parse_correction
from rlctl.algorithms.losses import ppo_clip, reinforce
from rlctl.algorithms.objective import Objective
from rlctl.errors import UsageError
from tests.algorithms.flat import layout, random_tokens, seeded


def settings(
    rollout_is: str | None = None,
    threshold: str | float = 2.0,
    *,
    normalize: bool = False,
    rs: str | None = None,
    rs_threshold: str | float | None = None,
) -> Correction:
    return parse_correction(rollout_is, threshold, normalize, rs, rs_threshold)


def run(log_ratio: list[float], row: list[int], correction: Correction):
    """Correct tokens whose log pi_train - log pi_rollout is given."""
    rollout = torch.full((len(row),), -2.0, dtype=torch.float64)
    return correct(rollout + torch.tensor(log_ratio, dtype=torch.float64), rollout, torch.tensor(row), correction)


def test_token_weights_and_their_cap():
    found = run([-1.0, 0.5, 3.0], [0, 0, 1], settings("token"))
    assert found.weights.tolist() == pytest.approx([math.exp(-1), math.exp(0.5), 2.0], abs=1e-6)
    assert found.keep.all()
    assert found.metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert found.metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)
    assert found.metrics["rollout_corr/rollout_is_max"] == 2.0


def test_sequence_weights_are_the_product_on_each_token():
    found = run([0.2, 0.3, -1.0], [0, 0, 1], settings("sequence"))
    assert found.weights.tolist() == pytest.approx([math.exp(0.5)] * 2 + [math.exp(-1.0)], abs=1e-6)


def test_icepop_zeroes_weights_and_leaves_the_mask():
    found = run([math.log(0.8), math.log(0.1), math.log(9.0)], [0, 0, 0], settings("token", "0.5_5.0"))
    assert found.weights.tolist() == pytest.approx([0.8, 0.0, 0.0], abs=1e-6)
    assert found.keep.all()
    metrics = found.metrics
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 3, abs=1e-6)
    assert metrics["rollout_corr/rollout_is_std"] == pytest.approx(0.3771236, abs=1e-6)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1 / 3, abs=1e-6)


def test_rejection_goes_by_mask_and_leaves_the_weights():
    found = run([0.0, 3.0], [0, 1], settings("token", rs="token_k1", rs_threshold="0.5_2.0"))
    assert found.keep.tolist() == [True, False]
    assert found.weights.tolist() == [1.0, 2.0]
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    assert found.metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 0.5
    assert found.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5


def test_shares_of_sequences_out_of_bounds_are_of_raw_weights():
    found = run([0.0, 0.0, 3.0, 3.0], [0, 0, 1, 1], settings("token"))
    assert found.metrics["rollout_corr/rollout_is_seq_fraction_high"] == 0.5
    assert found.metrics["rollout_corr/rollout_is_seq_max"] == 2.0


def test_without_a_correction_the_gap_is_measured_all_the_same():
    found = run([-0.1, -0.3], [0, 0], Correction())
    assert found.weights is None
    assert found.keep.all()
    assert found.metrics["rollout_corr/kl"] == pytest.approx(0.2, abs=1e-9)


def test_batch_normalisation_over_tokens_or_sequences():
    ratios = [math.log(0.5), math.log(0.5), math.log(1.5)]
    tokens = run(ratios, [0, 0, 1], settings("token", normalize=True))
    assert tokens.weights.mean().item() == pytest.approx(1.0)
    assert tokens.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(2.5 / 3)
    # Sequence weights 0.25 and 1.5: their mean over sequences is 0.875.
    sequences = run(ratios, [0, 0, 1], settings("sequence", normalize=True))
    assert sequences.weights.tolist() == pytest.approx([0.25 / 0.875] * 2 + [1.5 / 0.875])
    none_left = run([9.0], [0], settings("token", "0.5_2.0", normalize=True))
    assert none_left.weights.tolist() == [0.0]
    assert none_left.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0


def numpy_keep(log_ratio: np.ndarray, row: np.ndarray, option: str, low: float, high: float) -> np.ndarray:
    """Whether each token is kept, by a loop over sequences."""
    kind = {"1": lambda x: -x, "2": lambda x: x * x / 2, "3": lambda x: np.exp(x) - 1 - x}[option[-1]]
    keep = np.zeros(len(row), bool)
    for r in set(row.tolist()):
        inside = kind(log_ratio[row == r])
        if option.startswith("seq"):
            reduce = {"sum": np.sum, "mean": np.mean, "max": np.max}[option.split("_")[1]]
            inside = np.full(inside.shape, reduce(inside))
        keep[row == r] = (inside >= low) & (inside <= high)
    return keep


@pytest.mark.parametrize("option", OPTIONS)
def test_every_rejection_option_equals_a_loop(option):
    seeded()
    row = layout(20).row.numpy()
    log_ratio = np.random.default_rng(len(row)).normal(0, 0.4, len(row))
    threshold, low, high = ("0.7_1.5", math.log(0.7), math.log(1.5)) if "k1" in option else ("0.1", -math.inf, 0.1)
    found = run(log_ratio.tolist(), row.tolist(), settings(rs=option, rs_threshold=threshold))
    expected = numpy_keep(log_ratio, row, option, low, high)
    assert found.keep.numpy().tolist() == expected.tolist()
    metrics = {k.removeprefix("rollout_corr/"): v for k, v in found.metrics.items()}
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - expected.mean())
    hit = [not expected[row == r].all() for r in set(row.tolist())]
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(np.mean(hit))
    names = (
        "mean", "max", "min", "std", "fraction_high", "fraction_low", "seq_mean", "seq_max", "seq_min", "seq_std",
        "seq_max_deviation", "seq_fraction_high", "seq_fraction_low", "masked_fraction", "seq_masked_fraction",
    )  # fmt: skip
    assert {f"rollout_rs_{option}_{name}" for name in names} <= set(metrics)


def test_k1_bounds_are_on_the_inverse_ratio_and_one_number_means_both_sides():
    for ratio, kept in [(0.51, True), (0.49, False), (1.99, True), (2.01, False)]:
        found = run([-math.log(ratio)], [0], settings(rs="seq_sum_k1", rs_threshold="2.0"))
        assert bool(found.keep.all()) is kept, ratio
    one_sided = settings(rs="token_k1", rs_threshold="0.1_1.0")
    assert not run([-0.1], [0], one_sided).keep.any()  # pi_rollout / pi_train is above 1
    assert run([0.1], [0], one_sided).keep.all()


def test_several_options_must_all_hold_with_one_threshold_or_one_each():
    ratios, row = [0.0, 0.3, 0.0, 0.9], [0, 0, 1, 1]
    both = settings(rs="token_k2, seq_mean_k1", rs_threshold="0.1,0.7_1.5")
    assert run(ratios, row, both).keep.tolist() == [True, True, False, False]
    shared = settings(rs="token_k2,token_k3", rs_threshold=0.1)
    assert run(ratios, row, shared).keep.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"rollout_is": "tokens"}, "rollout_is"),
        ({"rollout_is": "token", "threshold": True}, "rollout_is_threshold"),
        ({"rollout_is": "token", "threshold": "-2"}, "rollout_is_threshold"),
        ({"rollout_is": "token", "threshold": "5_0.5"}, "rollout_is_threshold"),
        ({"rollout_is": "token", "threshold": "1_2_3"}, "rollout_is_threshold"),
        ({"rollout_is": "token", "threshold": "nan"}, "rollout_is_threshold"),
        ({"normalize": True}, "rollout_is_batch_normalize"),
        ({"rs": "seq_max_k1", "rs_threshold": 1}, "rollout_rs"),
        ({"rs": "token_k2,token_k2", "rs_threshold": 1}, "rollout_rs"),
        ({"rs": "token_k2"}, "rollout_rs_threshold"),
        ({"rs": "token_k2", "rs_threshold": True}, "rollout_rs_threshold"),
        ({"rs": "token_k2", "rs_threshold": "0.1_0.2"}, "rollout_rs_threshold"),
        ({"rs": "token_k1", "rs_threshold": "0.5"}, "rollout_rs_threshold"),
        ({"rs": "token_k1,token_k2,token_k3", "rs_threshold": "1,2"}, "rollout_rs_threshold"),
        ({"rs_threshold": "2"}, "rollout_rs_threshold"),
    ],
)
def test_wrong_settings_are_refused_under_their_key(arguments, key):
    with pytest.raises(UsageError) as caught:
        settings(**arguments)
    assert caught.value.where == f"algorithm.rollout_correction.{key}"
    assert caught.value.fix


def test_mismatch_metrics_equal_a_loop():
    seeded()
    row = layout(7).row
    rollout = -torch.rand(row.numel(), dtype=torch.float64) * 2
    train = rollout + 0.3 * torch.randn(row.numel(), dtype=torch.float64)
    found = correct(train, rollout, row, Correction()).metrics
    gap = (train - rollout).numpy()
    per_row = [(-train[row == r].mean().item(), -rollout[row == r].mean().item()) for r in range(7)]
    diff = np.array([t - o for t, o in per_row])
    sums = np.array([gap[(row == r).numpy()].sum() for r in range(7)])
    expected = {
        "kl": -gap.mean(),
        "k3_kl": (np.exp(gap) - 1 - gap).mean(),
        "training_ppl": np.mean([math.exp(t) for t, _ in per_row]),
        "training_log_ppl": np.mean([t for t, _ in per_row]),
        "rollout_ppl": np.mean([math.exp(o) for _, o in per_row]),
        "rollout_log_ppl": np.mean([o for _, o in per_row]),
        "log_ppl_diff": diff.mean(),
        "log_ppl_abs_diff": np.abs(diff).mean(),
        "log_ppl_diff_max": diff.max(),
        "log_ppl_diff_min": diff.min(),
        "ppl_ratio": np.exp(diff).mean(),
        "chi2_token": (np.exp(gap) ** 2).mean() - 1,
        "chi2_seq": np.exp(2 * sums).mean() - 1,
    }
    assert {k: found[f"rollout_corr/{k}"] for k in expected} == pytest.approx(expected, abs=1e-9)


def test_missing_short_or_odd_log_probs_are_an_error_and_never_skipped():
    row, three = torch.tensor([0, 0, 0]), torch.tensor([-1.0, -2.0, -3.0])
    for correction in (Correction(), settings("token")):
        with pytest.raises(LogProbsError, match="no rollout log-probs"):
            correct(three, None, row, correction)
        with pytest.raises(LogProbsError, match="no trainer log-probs"):
            correct(None, three, row, correction)
        with pytest.raises(LogProbsError, match="2 rollout log-probs for 3 tokens"):
            correct(three, three[:2], row, correction)
        with pytest.raises(LogProbsError, match="token 1 is nan"):
            correct(three, torch.tensor([-1.0, math.nan, -1.0]), row, correction)


def bypassed(loss: str, correction: Correction):
    """Return (tokens, loss) of a bypass: the old log-probs are the rollout's."""
    seeded()
    tokens = random_tokens(layout(9), torch.full((9,), 0.05))
    tokens.rollout_logprobs = tokens.old_logprobs
    return tokens, Objective(loss, bypass=True, correction=correction)(tokens).loss


def test_bypass_really_weighs_a_policy_gradient():
    tokens, loss = bypassed("reinforce", settings("token"))
    loss.backward()
    weight = (tokens.logprobs - tokens.rollout_logprobs).detach().exp().clamp(max=2.0)
    assert torch.allclose(tokens.logprobs.grad, -tokens.weights * tokens.advantages * weight, atol=1e-6)
    plain = reinforce(tokens).loss
    assert plain.item() != loss.item()


def test_bypass_with_a_ratio_takes_no_weights_but_rejects():
    tokens, weighed = bypassed("ppo_clip", settings("token"))
    assert weighed.item() == pytest.approx(ppo_clip(tokens).loss.item(), abs=1e-6)
    tokens, rejected = bypassed("ppo_clip", settings(rs="token_k1", rs_threshold="0.7_1.4"))
    k1 = (tokens.rollout_logprobs - tokens.logprobs).detach()
    keep = (k1 >= math.log(0.7)) & (k1 <= math.log(1.4))
    assert 0 < keep.sum() < keep.numel()
    tokens.weights = tokens.weights * keep
    assert rejected.item() == pytest.approx(ppo_clip(tokens).loss.item(), abs=1e-6)


def test_bypass_without_log_probs_is_an_error():
    tokens = random_tokens(layout(9), torch.full((9,), 0.05))
    with pytest.raises(LogProbsError):
        Objective("reinforce", bypass=True, correction=settings("token"))(tokens)
