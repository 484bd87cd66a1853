"""How far the policy that sampled and the policy that is trained are apart. Measured in every run."""

from __future__ import annotations

import torch

from rlctl.algorithms.divergence import LOG_BOUND
from rlctl.algorithms.sequences import row_lengths, row_mean, row_sum


def mismatch_metrics(train: torch.Tensor, rollout: torch.Tensor, row: torch.Tensor, rows: int) -> dict[str, float]:
    """Return numbers about the gap, with l = log pi_train - log pi_rollout on tokens sampled by the rollout.

    Args:
        train, rollout: log-probs of each trained token, float (T,).
        row: int64 (T,).
        rows: number of sequences.

    Returns:
        kl = E[-l]; k3_kl = E[e^l - 1 - l]; perplexities of both, as the mean over sequences, and their logs; the
        difference of the log perplexities (mean, mean of absolute values, max, min) and the mean ratio; chi2_token =
        E[e^2l] - 1; chi2_seq = E[exp(2 sum l)] - 1.
    """
    train, rollout = train.double(), rollout.double()
    present = row_lengths(row, rows) > 0
    log_ratio = train - rollout
    clamped = log_ratio.clamp(-LOG_BOUND, LOG_BOUND)
    train_log_ppl = -row_mean(train, row, rows)[present]
    rollout_log_ppl = -row_mean(rollout, row, rows)[present]
    difference = train_log_ppl - rollout_log_ppl
    sums = row_sum(log_ratio, row, rows)[present].clamp(-LOG_BOUND, LOG_BOUND)
    return {
        "kl": float(-log_ratio.mean()),
        "k3_kl": float((torch.expm1(clamped) - clamped).mean()),
        "training_ppl": float(train_log_ppl.exp().mean()),
        "training_log_ppl": float(train_log_ppl.mean()),
        "rollout_ppl": float(rollout_log_ppl.exp().mean()),
        "rollout_log_ppl": float(rollout_log_ppl.mean()),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(difference.abs().mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(difference.exp().mean()),
        "chi2_token": float((2 * clamped).exp().mean() - 1.0),
        "chi2_seq": float((2 * sums).exp().mean() - 1.0),
    }
