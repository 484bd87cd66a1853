"""Rows as flat token vectors, the form in which the algorithms take them, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlctl.experience.rows import Floats, Row


@dataclass(frozen=True)
class FlatRows:
    """Response tokens of rows, row after row: ``row`` int64 (T,) and ``mask`` bool (T,) (trained tokens)."""

    rows: Sequence[Row]
    row: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> FlatRows:
        """Lay out rows, each of which has a token."""
        lengths = torch.tensor([len(row.response_ids) for row in rows])
        mask = torch.from_numpy(np.concatenate([row.mask for row in rows]))
        return cls(rows, torch.repeat_interleave(torch.arange(len(rows)), lengths), mask)

    def column(self, column: Callable[[Row], Floats | None]) -> torch.Tensor | None:
        """Return an array of each row as one float32 vector (T,); None when a row has none."""
        arrays = [column(row) for row in self.rows]
        if any(array is None for array in arrays):
            return None
        return torch.from_numpy(np.concatenate([array for array in arrays if array is not None]))

    def split(self, values: torch.Tensor) -> list[np.ndarray]:
        """Return a vector (T,) as one array a row."""
        pieces = values.split([len(row.response_ids) for row in self.rows])
        return [piece.numpy() for piece in pieces]
