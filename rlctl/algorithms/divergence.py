"""Estimators of KL(sampling policy || other policy) from the log-probs of sampled tokens (joschu.net, kl-approx)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("k1", "k2", "k3")
LOG_BOUND = 20.0
"""Exponents are held within +- this, so that one odd token cannot make the batch infinite."""


def kl_estimate(logprobs: torch.Tensor, other: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the per-token estimate; tokens were sampled under ``logprobs``.

    With l = other - logprobs: k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 - l. Shapes are equal, (T,).
    """
    return divergence(other - logprobs, kind)


def divergence(log_ratio: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the estimate for l = log of (other policy / sampling policy), the exponent held within +-20."""
    log_ratio = log_ratio.clamp(-LOG_BOUND, LOG_BOUND)
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    if kind == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown KL estimator {kind!r}; known: {', '.join(KINDS)}")


@dataclass
class KlCoefficient:
    """The weight of the KL term: fixed, or steered towards a target (arXiv 1909.08593, section 2.2).

    Attributes:
        value: the weight now.
        target: KL of a token to steer to; None keeps the weight.
        horizon: samples over which a lasting error of 20 % or more changes the weight by a factor of about e^0.2.
    """

    value: float
    target: float | None = None
    horizon: float = 10_000.0

    def update(self, kl: float, samples: int) -> None:
        """Take in the mean KL of a step: value *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon."""
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * samples / self.horizon

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"value": self.value}

    def load(self, state: dict[str, Any]) -> None:
        """Go on with an earlier weight."""
        self.value = float(state["value"])
