"""The critic's loss."""

from __future__ import annotations

import torch

from rlctl.algorithms.losses import LossResult


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip: float | None = 0.2,
) -> LossResult:
    """Half the squared error, at least that of the clipped value (as in the PPO code of arXiv 2005.12729).

    Per token: max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2; without ``clip`` the first alone.

    Args:
        values: float32 (T,), with gradient.
        old_values: float32 (T,), before this step's updates.
        returns: float32 (T,).
        weights: float32 (T,), share of each token.
        clip: greatest change of a value that still lowers the loss.
    """
    error = (values - returns) ** 2
    clipped = error
    if clip is not None:
        clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
    per_token = torch.maximum(error, clipped) / 2
    with torch.no_grad():
        sums = {
            "critic/value": values.sum(),
            "critic/return": returns.sum(),
            "critic/error": (values - returns).abs().sum(),
            "critic/clip_fraction": (clipped > error).float().sum(),
        }
    return LossResult((per_token * weights).sum(), sums)
