"""Cutting a mini batch into micro-batches that fit a token budget and waste little on padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlctl.experience.rows import Row

# A micro-batch is closed early once its rows are this much shorter than its longest one and it is worth a pass by
# itself: padding costs more than another pass does.
_LOOSE = 0.85
_WORTH_TOKENS = 400


def partition(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return groups of row indices, longest rows first; ties keep the given order.

    Every group has (longest row) x (rows) <= ``budget`` padded tokens, except that a row longer than the budget goes
    alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        if groups:
            padded = longest * (len(groups[-1]) + 1)
            loose = lengths[index] < _LOOSE * longest and longest * len(groups[-1]) >= _WORTH_TOKENS
            if padded <= budget and not loose:
                groups[-1].append(index)
                continue
        groups.append([index])
        longest = lengths[index]
    return groups


@dataclass
class MicroBatch:
    """Rows of one pass as tensors.

    Attributes:
        indices: position of each row in the mini batch.
        input_ids: int64 (rows, longest), each row without its last token, which predicts nothing, padded on the right.
            Right padding needs no attention mask under causal attention: no real token looks at a later one.
        positions: int64 (T,), flat index (row * longest + column) of the hidden state that predicts each response
            token, row after row.
        targets: int64 (T,), the response tokens.
        row: int64 (T,), row of each response token.
        idle: the pass only keeps step with other ranks; nothing of it counts.
        still: no token of it has a gradient, so that a forward pass is enough.
    """

    indices: list[int]
    input_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    row: torch.Tensor
    idle: bool = False
    still: bool = False


def micro_batch(rows: Sequence[Row], indices: list[int], *, pad_id: int, device: torch.device) -> MicroBatch:
    """Return the chosen rows as tensors on ``device``."""
    longest = max(rows[i].length for i in indices) - 1
    input_ids = torch.full((len(indices), longest), pad_id, dtype=torch.int64)
    positions, targets, row_of = [], [], []
    for row, index in enumerate(indices):
        prompt, response = rows[index].prompt_ids, rows[index].response_ids
        seen = prompt + response[:-1]
        input_ids[row, : len(seen)] = torch.tensor(seen, dtype=torch.int64)
        first = row * longest + len(prompt) - 1
        positions.append(torch.arange(first, first + len(response)))
        targets.extend(response)
        row_of.append(torch.full((len(response),), row, dtype=torch.int64))
    return MicroBatch(
        indices=indices,
        input_ids=input_ids.to(device),
        positions=torch.cat(positions).to(device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        row=torch.cat(row_of).to(device),
    )
