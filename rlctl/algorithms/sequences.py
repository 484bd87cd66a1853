"""Sums, means and maxima over the tokens of each sequence, for flat token vectors.

A batch is flat: values of shape (T,), and ``row`` (int64, (T,)) says which of N sequences each token belongs to.
"""

from __future__ import annotations

import torch


def row_count(row: torch.Tensor) -> int:
    """Return the number of sequences that ``row`` speaks of: its highest index + 1."""
    return int(row.max()) + 1 if row.numel() else 0


def row_sum(values: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the sum of each sequence, shape (rows,); 0 for one without tokens."""
    return values.new_zeros(rows).index_add(0, row, values)


def row_lengths(row: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the tokens of each sequence, int64 of shape (rows,)."""
    return torch.bincount(row, minlength=rows)


def row_mean(values: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the mean of each sequence, shape (rows,); 0 for one without tokens."""
    return row_sum(values, row, rows) / row_lengths(row, rows).clamp(min=1)


def row_max(values: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the largest value of each sequence, shape (rows,); 0 for one without tokens."""
    found = values.new_full((rows,), float("-inf")).scatter_reduce(0, row, values, "amax")
    return torch.where(torch.isinf(found), torch.zeros_like(found), found)


def whiten(values: torch.Tensor, *, eps: float = 1e-8) -> torch.Tensor:
    """Return ``values`` with mean 0 and variance 1 (the sample variance, n - 1), in float64.

    One value alone becomes 0. As in TRL's and verl's ``masked_whiten``: the deviation is ``sqrt(variance + eps)``.
    """
    values = values.double()
    if values.numel() < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var() + eps).sqrt()
