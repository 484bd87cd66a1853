"""How token losses become one number, as a weight for each token.

With weights fixed for a whole mini batch, the sum over micro-batches is the loss of the mini batch, however it was
cut.
"""

from __future__ import annotations

import torch

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def token_weights(mode: str, lengths: torch.Tensor, *, horizon: int) -> torch.Tensor:
    """Return the weight of one token of each sequence.

    Args:
        mode: ``token-mean`` (all tokens of the mini batch alike), ``seq-mean-token-sum``, ``seq-mean-token-mean``, or
            ``seq-mean-token-sum-norm`` (the sum over ``horizon``, as in Dr.GRPO, arXiv 2503.20783).
        lengths: trained tokens of each sequence of the mini batch, int64 of shape (N,).
        horizon: the longest response allowed, in tokens.

    Returns:
        float32 of shape (N,); a sequence without trained tokens weighs 0.
    """
    count = lengths.numel()
    trained = lengths > 0
    if mode == "token-mean":
        weight = torch.full((count,), 1.0 / max(int(lengths.sum()), 1), dtype=torch.float64)
    elif mode == "seq-mean-token-sum":
        weight = torch.full((count,), 1.0 / max(int(trained.sum()), 1), dtype=torch.float64)
    elif mode == "seq-mean-token-mean":
        weight = 1.0 / (lengths.clamp(min=1).double() * max(int(trained.sum()), 1))
    elif mode == "seq-mean-token-sum-norm":
        weight = torch.full((count,), 1.0 / (max(int(trained.sum()), 1) * horizon), dtype=torch.float64)
    else:
        raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(MODES)}")
    return torch.where(trained, weight, torch.zeros_like(weight)).float()
