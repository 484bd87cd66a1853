"""Advantage estimators: from the rewards of a batch to one number a response."""

from __future__ import annotations

import torch


def group_index(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (index of each row's group in 0..G-1, rows of each group) for int64 group ids of shape (N,)."""
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    return index, counts


def grpo(rewards: torch.Tensor, groups: torch.Tensor, *, normalize_std: bool = True, eps: float = 1e-6) -> torch.Tensor:
    """Group-relative advantages (arXiv 2402.03300, eq. 4): reward minus the mean of its group, over its deviation.

    Groups are told apart by id, not by position, so that an incomplete group changes nobody else's baseline. The
    deviation is the sample one (n - 1), as ``torch.std``; a group of one has advantage 0.

    Args:
        rewards: float of shape (N,).
        groups: int64 of shape (N,), the prompt of each row.
        normalize_std: divide by (deviation + eps).

    Returns:
        float tensor of shape (N,).
    """
    rewards = rewards.double()
    index, counts = group_index(groups)
    size = counts.numel()
    mean = torch.zeros(size, dtype=rewards.dtype).index_add_(0, index, rewards) / counts
    centred = rewards - mean[index]
    if normalize_std:
        square = torch.zeros(size, dtype=rewards.dtype).index_add_(0, index, centred**2)
        std = (square / (counts - 1).clamp(min=1)).sqrt()
        centred = centred / (std[index] + eps)
    return centred.float()
