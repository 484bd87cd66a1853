"""Estimators of KL(sampling policy || other policy) from the log-probs of sampled tokens (joschu.net, kl-approx)."""

from __future__ import annotations

import torch

KINDS = ("k1", "k2", "k3")


def kl_estimate(logprobs: torch.Tensor, other: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the per-token estimate; tokens were sampled under ``logprobs``.

    With l = other - logprobs: k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 - l. Shapes are equal, (T,).
    """
    log_ratio = (other - logprobs).clamp(-20.0, 20.0)
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    if kind == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown KL estimator {kind!r}; known: {', '.join(KINDS)}")
