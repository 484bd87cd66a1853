"""Importance weights between trainer and rollout, and what is worth knowing about them."""

from __future__ import annotations

import torch

from rlctl.algorithms.correction.settings import Weighting
from rlctl.algorithms.divergence import LOG_BOUND
from rlctl.algorithms.sequences import row_lengths, row_mean, row_sum


def raw_weights(log_ratio: torch.Tensor, row: torch.Tensor, rows: int, level: str) -> torch.Tensor:
    """Return exp of each token's log ratio, or of its sequence's sum on each token; (T,), exponents within +-20."""
    if level == "token":
        return log_ratio.clamp(-LOG_BOUND, LOG_BOUND).exp()
    return row_sum(log_ratio, row, rows).clamp(-LOG_BOUND, LOG_BOUND).exp()[row]


def bounded(raw: torch.Tensor, weighting: Weighting) -> torch.Tensor:
    """Return truncated weights min(w, C) (Ionides 2008), or IcePop's (w within lo .. hi, else 0)."""
    if weighting.lower is None:
        return raw.clamp(max=weighting.upper)
    return torch.where((raw >= weighting.lower) & (raw <= weighting.upper), raw, torch.zeros_like(raw))


def importance_weights(
    log_ratio: torch.Tensor, row: torch.Tensor, rows: int, weighting: Weighting
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return (weight of each token, the same before any bound and factor, the factor that the bounded ones are divided
    by).

    Args:
        log_ratio: log pi_train - log pi_rollout of each trained token, float (T,).
        row: int64 (T,).
        rows: number of sequences.
        weighting: what to do.
    """
    raw = raw_weights(log_ratio, row, rows, weighting.level)
    weights = bounded(raw, weighting)
    factor = batch_mean(weights, row, rows, weighting.level) if weighting.batch_normalize else 1.0
    return weights / factor, raw, factor


def weight_metrics(
    raw: torch.Tensor, weights: torch.Tensor, row: torch.Tensor, rows: int, weighting: Weighting
) -> dict[str, float]:
    """Return metrics ``rollout_is_*``: mean, max, min, std and ESS of the bounded ``weights`` (not normalised); the
    shares of ``raw`` weights above and below the bounds (below 1/C for truncation); the same for the sequences' mean
    weights; the share set to 0 by IcePop."""
    low = weighting.lower if weighting.lower is not None else 1.0 / weighting.upper
    outside = (raw > weighting.upper) | (raw < low)
    return {
        **_moments("rollout_is", weights),
        "rollout_is_eff_sample_size": effective_sample_size(weights),
        "rollout_is_ratio_fraction_high": _share(raw > weighting.upper),
        "rollout_is_ratio_fraction_low": _share(raw < low),
        "rollout_is_oob_ratio": _share(outside) if weighting.lower is not None else 0.0,
        **_sequence_metrics(raw, weights, row, rows, low, weighting.upper),
    }


def batch_mean(weights: torch.Tensor, row: torch.Tensor, rows: int, level: str) -> float:
    """Return the mean weight over tokens, or over sequences; 1 when all weights are 0, which divides by nothing."""
    mean = weights.mean() if level == "token" else row_mean(weights, row, rows)[row_lengths(row, rows) > 0].mean()
    return float(mean) or 1.0


def effective_sample_size(weights: torch.Tensor) -> float:
    """Return 1 / E[(w / E w)^2], a share of the sample; 0 when all weights are 0."""
    mean = weights.mean()
    return float(mean**2 / (weights**2).mean()) if float(mean) else 0.0


def _sequence_metrics(
    raw: torch.Tensor, weights: torch.Tensor, row: torch.Tensor, rows: int, low: float, high: float
) -> dict[str, float]:
    """Metrics of the sequences' mean weights; the shares out of bounds are those of raw weights."""
    present = row_lengths(row, rows) > 0
    mean, raw_mean = row_mean(weights, row, rows)[present], row_mean(raw, row, rows)[present]
    return {
        **_moments("rollout_is_seq", mean),
        "rollout_is_seq_max_deviation": float((mean - 1.0).abs().max()),
        "rollout_is_seq_fraction_high": _share(raw_mean > high),
        "rollout_is_seq_fraction_low": _share(raw_mean < low),
    }


def _moments(name: str, values: torch.Tensor) -> dict[str, float]:
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_max": float(values.max()),
        f"{name}_min": float(values.min()),
        f"{name}_std": float(values.std(correction=0)),
    }


def _share(condition: torch.Tensor) -> float:
    return float(condition.double().mean())
