"""Policy losses on flat token vectors.

A micro-batch is a flat vector of response tokens, without padding; ``row`` says which sequence each belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Tokens:
    """The response tokens of one micro-batch, each tensor of shape (T,).

    Attributes:
        logprobs: float32, of the policy being trained, with gradient.
        old_logprobs: float32, of the policy at the start of the step.
        advantages: float32.
        weights: float32, share of each token in the mini batch's loss (``aggregation.token_weights``).
        row: int64, sequence of each token, 0 .. rows-1.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    row: torch.Tensor


@dataclass
class LossResult:
    """``loss``: scalar with gradient. ``sums``: metric -> sum over this micro-batch's tokens, to be divided by their
    number in the mini batch."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]


def ppo_clip(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossResult:
    """Clipped surrogate (arXiv 1707.06347, eq. 7) with separate distances below and above (arXiv 2503.14476, eq. 10).

    Per token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - old logprob); the exponent is
    held within +-20 so that one odd token cannot make the batch infinite.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain = ratio * tokens.advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    per_token = -torch.minimum(plain, clipped)
    with torch.no_grad():
        sums = {
            "clip_fraction": (clipped < plain).float().sum(),
            "ratio": ratio.sum(),
            "ppo_kl": (-log_ratio).sum(),
        }
    return LossResult((per_token * tokens.weights).sum(), sums)
