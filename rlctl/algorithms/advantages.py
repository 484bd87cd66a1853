"""Advantage estimators that need no critic: from the rewards of a batch to one number a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.algorithms.returns import discounted_returns, on_trained_tokens
from rlctl.algorithms.sequences import row_sum, whiten


@dataclass(frozen=True)
class RewardedBatch:
    """What an estimator sees: N responses with T tokens in all, response after response.

    Attributes:
        token_rewards: float64 (T,): the penalty of each token, and the response's reward on its last token.
        groups: int64 (N,), the prompt of each response.
        row: int64 (T,), the response of each token, not decreasing.
        mask: bool (T,), the tokens that are trained. Rewards of the others count for the response all the same.
        values: float64 (T,), the critic's value of the state before each token; None without a critic.
    """

    token_rewards: torch.Tensor
    groups: torch.Tensor
    row: torch.Tensor
    mask: torch.Tensor
    values: torch.Tensor | None = None

    @property
    def scores(self) -> torch.Tensor:
        """Sum of the rewards of each response, float64 (N,)."""
        return row_sum(self.token_rewards, self.row, self.groups.numel())


@dataclass(frozen=True)
class Advantages:
    """``advantages``: float32 (T,), 0 on tokens that are not trained. ``returns``: float32 (T,), what the critic should
    have said; None from an estimator without a critic."""

    advantages: torch.Tensor
    returns: torch.Tensor | None = None


def group_index(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (index of each row's group in 0..G-1, rows of each group) for int64 group ids of shape (N,)."""
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    return index, counts


def group_relative(
    scores: torch.Tensor,
    groups: torch.Tensor,
    *,
    normalize_std: bool = True,
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return each score minus its group's baseline, float64 (N,); a group of one gets 0.

    Groups are told apart by id, not by position, so that an incomplete group changes nobody else's baseline.

    Args:
        scores: float of shape (N,).
        groups: int64 of shape (N,).
        normalize_std: divide by (deviation of the group + eps); the sample deviation (n - 1), as ``torch.std``.
        leave_one_out: the baseline is the mean of the group's other scores, which is unbiased, not the mean of all.
    """
    scores = scores.double()
    index, counts = group_index(groups)
    size = counts.numel()
    mean = row_sum(scores, index, size) / counts
    centred = scores - mean[index]
    std = (row_sum(centred**2, index, size) / (counts - 1).clamp(min=1)).sqrt()
    if leave_one_out:
        # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
        centred = centred * (counts / (counts - 1).clamp(min=1))[index]
    return centred / (std[index] + eps) if normalize_std else centred


def _broadcast(per_response: torch.Tensor, batch: RewardedBatch) -> Advantages:
    return Advantages((per_response[batch.row] * batch.mask).float())


def grpo(
    batch: RewardedBatch, *, normalize_std: bool = True, leave_one_out: bool = False, eps: float = 1e-6
) -> Advantages:
    """Group-relative advantages (arXiv 2402.03300, eq. 4); without the deviation as in Dr.GRPO (arXiv 2503.20783)."""
    return _broadcast(
        group_relative(batch.scores, batch.groups, normalize_std=normalize_std, leave_one_out=leave_one_out, eps=eps),
        batch,
    )


def rloo(batch: RewardedBatch) -> Advantages:
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740): the score minus the mean of the group's others."""
    return _broadcast(group_relative(batch.scores, batch.groups, normalize_std=False, leave_one_out=True), batch)


def reinforce_pp(batch: RewardedBatch, *, gamma: float = 1.0) -> Advantages:
    """REINFORCE++ (arXiv 2501.03262): discounted returns of each token, whitened over the batch; no groups needed."""
    returns = discounted_returns(on_trained_tokens(batch.token_rewards, batch.row, batch.mask), batch, gamma=gamma)
    return _whitened(returns, batch)


def reinforce_pp_baseline(batch: RewardedBatch) -> Advantages:
    """REINFORCE++-baseline (arXiv 2501.03262): the score minus its group's mean, whitened over the batch's tokens."""
    scores = group_relative(batch.scores, batch.groups, normalize_std=False)
    return _whitened(scores[batch.row], batch)


def _whitened(values: torch.Tensor, batch: RewardedBatch) -> Advantages:
    result = torch.zeros_like(values, dtype=torch.float64)
    result[batch.mask] = whiten(values[batch.mask])
    return Advantages(result.float())
