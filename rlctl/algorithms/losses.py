"""Policy losses on flat token vectors.

A micro-batch is a flat vector of trained response tokens, without padding and without masked tokens; ``row`` says which
sequence each belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.algorithms.divergence import LOG_BOUND
from rlctl.algorithms.sequences import row_count, row_mean


@dataclass
class Tokens:
    """The trained tokens of one micro-batch, each tensor of shape (T,).

    Attributes:
        logprobs: float32, of the policy being trained, with gradient.
        old_logprobs: float32, of the policy that the ratio is taken against.
        advantages: float32.
        weights: float32, share of each token in the mini batch's loss (``aggregation.token_weights``).
        row: int64, sequence of each token, 0 .. rows-1.
        importance: float32, rollout-correction weight of each token, without gradient; None for none.
        rollout_logprobs: float32, as the rollout engine reported them; None where nothing needs them.
        ref_logprobs: float32, of the reference model; None without one.
        entropy: float32, of the policy's distribution at each token, with gradient; None where nothing needs it.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    row: torch.Tensor
    importance: torch.Tensor | None = None
    rollout_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


@dataclass
class LossResult:
    """``loss``: scalar with gradient. ``sums``: metric -> sum over this micro-batch's tokens, to be divided by their
    number in the mini batch."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]


def total(per_token: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return the loss of the micro-batch: each token's, by its correction weight if it has one, by its share."""
    if tokens.importance is not None:
        per_token = per_token * tokens.importance
    return (per_token * tokens.weights).sum()


def ppo_clip(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None
) -> LossResult:
    """Clipped surrogate (arXiv 1707.06347, eq. 7) with separate distances below and above (arXiv 2503.14476, eq. 10).

    Per token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - old logprob). With ``dual_clip``
    c > 1 the loss of a token with A < 0 is at most -c A (arXiv 1912.09729, eq. 5).
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-LOG_BOUND, LOG_BOUND)
    return _clipped(tokens, log_ratio, clip_low, clip_high, dual_clip)


def gspo(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None
) -> LossResult:
    """Group sequence policy optimisation (arXiv 2507.18071, GSPO-token, eq. 14): one ratio a sequence.

    s = exp(mean over the sequence's tokens of logprob - old logprob); token t has the value s and the gradient of
    s * pi(t) / stop(pi(t)). The paper's clips are small (3e-4, 4e-4) and its aggregation seq-mean-token-mean.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-LOG_BOUND, LOG_BOUND)
    mean = row_mean(log_ratio.detach(), tokens.row, row_count(tokens.row))[tokens.row]
    return _clipped(tokens, mean + tokens.logprobs - tokens.logprobs.detach(), clip_low, clip_high, dual_clip)


def cispo(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossResult:
    """Clipped importance-sampling policy optimisation (arXiv 2506.13585, eq. 4): -stop(clip(r)) A logprob.

    No token loses its gradient; only its weight is bounded. A ``clip_low`` of 1 bounds it from above alone.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-LOG_BOUND, LOG_BOUND)
    ratio = log_ratio.exp().detach()
    clipped = ratio.clamp(max(0.0, 1.0 - clip_low), 1.0 + clip_high)
    per_token = -clipped * tokens.advantages * tokens.logprobs
    return LossResult(total(per_token, tokens), _sums(ratio, log_ratio, (clipped != ratio).float()))


def reinforce(tokens: Tokens) -> LossResult:
    """The plain policy gradient: -A logprob. It has no ratio; correction weights, if any, come with the tokens."""
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach().clamp(-LOG_BOUND, LOG_BOUND)
    ratio = log_ratio.exp()
    return LossResult(
        total(-tokens.advantages * tokens.logprobs, tokens), _sums(ratio, log_ratio, torch.zeros_like(ratio))
    )


def _clipped(
    tokens: Tokens, log_ratio: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossResult:
    ratio = log_ratio.exp()
    plain = ratio * tokens.advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    per_token = -torch.minimum(plain, clipped)
    with torch.no_grad():
        sums = _sums(ratio, log_ratio, (clipped < plain).float())
    if dual_clip is not None:
        bound = -dual_clip * tokens.advantages
        over = (tokens.advantages < 0) & (per_token > bound)
        per_token = torch.where(over, bound, per_token)
        sums["dual_clip_fraction"] = over.float().sum()
    return LossResult(total(per_token, tokens), sums)


def _sums(ratio: torch.Tensor, log_ratio: torch.Tensor, clipped: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "clip_fraction": clipped.sum(),
        "ratio": ratio.detach().sum(),
        "ppo_kl": (-log_ratio.detach()).sum(),
    }
