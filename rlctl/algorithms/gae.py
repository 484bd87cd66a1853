"""Generalised advantage estimation: the estimator that needs a critic."""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages import Advantages, RewardedBatch
from rlctl.algorithms.returns import generalized_advantages, on_trained_tokens
from rlctl.algorithms.sequences import whiten
from rlctl.errors import UsageError


def gae(batch: RewardedBatch, *, gamma: float = 1.0, lam: float = 1.0, whiten_advantages: bool = True) -> Advantages:
    """Generalised advantages (arXiv 1506.02438) and the critic's targets A + V.

    Args:
        batch: with ``values``.
        gamma: discount of a token.
        lam: weight of longer estimates; 1 is the return minus the value.
        whiten_advantages: mean 0 and variance 1 over the batch's trained tokens. The returns stay as they are.

    Raises:
        UsageError: the batch has no values.
    """
    if batch.values is None:
        raise UsageError(
            "gae needs the critic's values, and there are none",
            where="algorithm.critic.model",
            fix="set algorithm.critic.model=actor, or take algorithm.advantage=grpo",
        )
    values = batch.values.double()
    rewards = on_trained_tokens(batch.token_rewards, batch.row, batch.mask)
    advantages = generalized_advantages(rewards, values, batch, gamma=gamma, lam=lam)
    returns = torch.where(batch.mask, advantages + values, torch.zeros_like(values))
    if whiten_advantages:
        whitened = torch.zeros_like(advantages)
        whitened[batch.mask] = whiten(advantages[batch.mask])
        advantages = whitened
    return Advantages((advantages * batch.mask).float(), returns.float())
