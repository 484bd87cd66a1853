"""Passes over rows in micro-batches, on one device: cutting, autocast, and filing what comes out under its row."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlctl.experience.rows import Floats, Row
from rlctl.model.micro_batches import MicroBatch, micro_batch, partition

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Passes:
    """How rows go through a model.

    Args:
        dtype: element type of the weights handed to rollouts, "float32" or "bfloat16"; the trainer's are float32.
        activation_dtype: of passes; ``dtype`` when None.
        micro_batch_tokens: most tokens of one pass, padding counted.
        pad_id: token that fills the end of short rows.
        device: where the model computes.

    Attributes:
        cuts: row indexes of each pass that added to the last gradient, in order.
    """

    def __init__(
        self,
        *,
        dtype: str,
        micro_batch_tokens: int,
        pad_id: int,
        device: torch.device,
        activation_dtype: str | None = None,
    ) -> None:
        self.dtype = DTYPES[dtype]
        self.activation_dtype = DTYPES[activation_dtype or dtype]
        self.device = device
        self._budget = micro_batch_tokens
        self._pad_id = pad_id
        self.cuts: list[list[int]] = []

    def micro_batches(self, rows: Sequence[Row], still: Container[int] = ()) -> Iterator[MicroBatch]:
        """Yield the rows in micro-batches, those with an index in ``still`` after the others and marked so."""
        parts = [[i for i in range(len(rows)) if (i in still) is wanted] for wanted in (False, True)]
        for part, marked in zip(parts, (False, True), strict=True):
            for cut in partition([rows[i].length for i in part], self._budget):
                indices = [part[i] for i in cut]
                batch = micro_batch(rows, indices, pad_id=self._pad_id, device=self.device)
                yield replace(batch, still=marked)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self.activation_dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.activation_dtype)

    def each_token(self, rows: Sequence[Row], forward: Callable[[MicroBatch], torch.Tensor]) -> list[Floats]:
        """Return ``forward``'s value of each response token, by row, without gradient."""
        result = empty(rows)
        with torch.no_grad():
            for batch in self.micro_batches(rows):
                with self.autocast():
                    values = forward(batch)
                if not batch.idle:
                    scatter(values, batch, rows, result)
        return self.complete(rows, result)

    def complete(self, rows: Sequence[Row], values: list[Floats]) -> list[Floats]:
        """Return the values of all rows, given those of the rows that went through here."""
        return values

    def shares(self) -> list[list[list[int]]]:
        """Return the ``cuts`` of each rank that shares the rows."""
        return [self.cuts]

    def add_up(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return sums over all rows, given those over the rows that went through here."""
        return dict(sums)


def empty(rows: Sequence[Row]) -> list[Floats]:
    """Return a place for each row's values."""
    return [np.zeros(0, np.float32)] * len(rows)


def scatter(values: torch.Tensor, batch: MicroBatch, rows: Sequence[Row], result: list[Floats]) -> None:
    """File the flat ``values`` of a micro-batch under the rows they belong to."""
    pieces = values.cpu().split([len(rows[i].response_ids) for i in batch.indices])
    for index, piece in zip(batch.indices, pieces, strict=True):
        result[index] = piece.numpy()


def gather(rows: Sequence[Row], batch: MicroBatch, column: Callable[[Row], Any], device: torch.device) -> torch.Tensor:
    """Return an array of each row of a micro-batch as one flat tensor on ``device``."""
    return torch.from_numpy(np.concatenate([column(rows[i]) for i in batch.indices])).to(device)
