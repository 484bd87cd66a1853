"""From a verifier's number for each response to a reward for each token."""

from __future__ import annotations

import torch


def token_rewards(
    scores: torch.Tensor,
    row: torch.Tensor,
    *,
    kl: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the reward of each token, float64 (T,): -kl_coef * kl, and the response's score on its last token.

    Args:
        scores: float (N,), one a response; every response has a token.
        row: int64 (T,), the response of each token, not decreasing.
        kl: estimate of KL(policy || reference) at each token, float (T,) (arXiv 1909.08593, eq. 2); None for none.
        kl_coef: weight of the penalty.
        mask: bool (T,): only these tokens are penalised; None for all.
    """
    rewards = torch.zeros(row.numel(), dtype=torch.float64)
    if kl is not None:
        # Not a product: what is masked may have no log-probs, and so no number here.
        rewards -= kl_coef * (kl.double() if mask is None else torch.where(mask, kl.double(), 0.0))
    last = torch.bincount(row, minlength=scores.numel()).cumsum(0) - 1
    return rewards.index_add(0, last, scores.double())
