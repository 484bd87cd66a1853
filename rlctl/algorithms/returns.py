"""Sums over the future of a response: discounted returns and the generalised advantage recursion.

Only trained tokens are actions. What lies between them (observations of a conversation, rejected tokens) takes no step
of the discount, and its reward goes to the trained token before it.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Layout(Protocol):
    """The token layout of a batch; see ``RewardedBatch``."""

    @property
    def row(self) -> torch.Tensor: ...
    @property
    def mask(self) -> torch.Tensor: ...


def on_trained_tokens(rewards: torch.Tensor, row: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Move each untrained token's reward to the nearest trained token before it in its response.

    A reward before a response's first trained token is nobody's doing and is dropped. Shapes (T,).
    """
    place = torch.arange(row.numel(), device=row.device)
    last = torch.where(mask, place, place.new_full((), -1)).cummax(0).values if row.numel() else place
    mine = (last >= 0) & (row[last.clamp(min=0)] == row)
    return torch.zeros_like(rewards).index_add(0, last[mine], rewards[mine])


def discounted_returns(rewards: torch.Tensor, layout: Layout, *, gamma: float) -> torch.Tensor:
    """Return G_t = r_t + gamma G_(t+1) over the trained tokens of each response, float64 (T,), 0 elsewhere."""
    return _recursion(rewards, layout, gamma)


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, layout: Layout, *, gamma: float, lam: float
) -> torch.Tensor:
    """Return A_t = d_t + gamma lam A_(t+1), d_t = r_t + gamma V_(t+1) - V_t (arXiv 1506.02438, eq. 16), float64 (T,).

    After the last token of a response the value is 0, also when the response was cut at its longest length.
    """
    following = torch.zeros_like(values)
    trained = layout.mask.nonzero().squeeze(1)
    if trained.numel() > 1:
        here, after = trained[:-1], trained[1:]
        same = layout.row[here] == layout.row[after]
        following[here[same]] = values[after[same]]
    return _recursion(rewards + gamma * following - values, layout, gamma * lam)


def _recursion(terms: torch.Tensor, layout: Layout, factor: float) -> torch.Tensor:
    """x_t = terms_t + factor * x_(t+1) within each response, over trained tokens only."""
    result = torch.zeros_like(terms, dtype=torch.float64)
    trained = layout.mask.nonzero().squeeze(1)
    if not trained.numel():
        return result
    _, index, lengths = torch.unique_consecutive(layout.row[trained], return_inverse=True, return_counts=True)
    column = torch.arange(trained.numel(), device=trained.device) - (lengths.cumsum(0) - lengths)[index]
    table = terms.new_zeros((lengths.numel(), int(lengths.max())), dtype=torch.float64)
    table[index, column] = terms[trained].double()
    for step in range(table.shape[1] - 2, -1, -1):
        table[:, step] += factor * table[:, step + 1]
    result[trained] = table[index, column]
    return result
