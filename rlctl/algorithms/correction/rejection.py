"""Rejection: tokens, or whole sequences, whose two policies differ too much are not trained."""

from __future__ import annotations

import torch

from rlctl.algorithms.correction.settings import Rejection
from rlctl.algorithms.divergence import divergence
from rlctl.algorithms.sequences import row_lengths, row_max, row_mean, row_sum

_OVER_TOKENS = {"sum": row_sum, "mean": row_mean, "max": row_max}


def rejection_mask(
    log_ratio: torch.Tensor, row: torch.Tensor, rows: int, rejections: tuple[Rejection, ...]
) -> torch.Tensor:
    """Return which tokens are kept, bool (T,): those that meet every criterion.

    The statistic of an option ``seq_mean_k1`` is the mean over the sequence of k1 (the log of the inverse geometric
    mean ratio); ``sum`` and ``max`` likewise; ``token_*`` is each token's own.
    """
    keep = torch.ones_like(row, dtype=torch.bool)
    for rejection in rejections:
        keep &= _kept(_statistic(log_ratio, row, rows, rejection.option)[0], rejection)
    return keep


def rejection_metrics(
    log_ratio: torch.Tensor, row: torch.Tensor, rows: int, rejections: tuple[Rejection, ...]
) -> dict[str, float]:
    """Return metrics ``rollout_rs_*`` of each criterion, and of all together."""
    metrics: dict[str, float] = {}
    for rejection in rejections:
        statistic, per_row = _statistic(log_ratio, row, rows, rejection.option)
        metrics |= _metrics(rejection, statistic, per_row[row_lengths(row, rows) > 0])
        metrics |= _masked(f"rollout_rs_{rejection.option}", _kept(statistic, rejection), row, rows)
    return metrics | _masked("rollout_rs", rejection_mask(log_ratio, row, rows, rejections), row, rows)


def _kept(statistic: torch.Tensor, rejection: Rejection) -> torch.Tensor:
    return (statistic >= rejection.low) & (statistic <= rejection.high)


def _statistic(log_ratio: torch.Tensor, row: torch.Tensor, rows: int, option: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the statistic on each token (T,) and of each sequence (rows,): its own, or the mean of its tokens'."""
    level, *over, kind = option.split("_")
    tokens = divergence(log_ratio, kind)
    if level == "token":
        return tokens, row_mean(tokens, row, rows)
    per_row = _OVER_TOKENS[over[0]](tokens, row, rows)
    return per_row[row], per_row


def _metrics(rejection: Rejection, statistic: torch.Tensor, per_row: torch.Tensor) -> dict[str, float]:
    name = f"rollout_rs_{rejection.option}"
    values = statistic if rejection.level == "token" else per_row
    return {
        f"{name}_mean": float(statistic.mean()),
        f"{name}_max": float(values.max()),
        f"{name}_min": float(values.min()),
        f"{name}_std": float(statistic.std(correction=0)),
        f"{name}_fraction_high": float((values > rejection.high).double().mean()),
        f"{name}_fraction_low": float((values < rejection.low).double().mean()),
        f"{name}_seq_mean": float(per_row.mean()),
        f"{name}_seq_max": float(per_row.max()),
        f"{name}_seq_min": float(per_row.min()),
        f"{name}_seq_std": float(per_row.std(correction=0)),
        f"{name}_seq_max_deviation": float(per_row.abs().max()),
        f"{name}_seq_fraction_high": float((per_row > rejection.high).double().mean()),
        f"{name}_seq_fraction_low": float((per_row < rejection.low).double().mean()),
    }


def _masked(name: str, keep: torch.Tensor, row: torch.Tensor, rows: int) -> dict[str, float]:
    """Shares of tokens, and of sequences with a token, that are rejected."""
    hit = row_max((~keep).double(), row, rows)[row_lengths(row, rows) > 0]
    return {
        f"{name}_masked_fraction": float((~keep).double().mean()),
        f"{name}_seq_masked_fraction": float(hit.mean()),
    }
