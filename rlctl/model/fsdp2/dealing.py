"""Which rank trains which rows: as many tokens each, and as many passes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from rlctl.experience.rows import Floats, Row
from rlctl.model.micro_batches import MicroBatch, micro_batch, partition
from rlctl.model.passes import Passes


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return each rank's rows: the longest first, each to the rank with the fewest tokens so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = min(range(ranks), key=lambda rank: (load[rank], rank))
        hands[rank].append(index)
        load[rank] += lengths[index]
    return hands


def dealt_micro_batches(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Return each rank's micro-batches, as indices of rows with these lengths; see ``partition`` for the budget."""
    hands = deal(lengths, ranks)
    return [[[hand[i] for i in cut] for cut in partition([lengths[i] for i in hand], budget)] for hand in hands]


class DealtPasses(Passes):
    """Passes over this rank's share of rows that all ranks are given.

    Every rank makes the same number of passes, since the model is gathered in step; one that has fewer micro-batches
    repeats its, or somebody's, shortest row, which counts for nothing.

    Args:
        dtype: of the weights handed to rollouts, "float32" or "bfloat16".
        micro_batch_tokens, pad_id, device: see ``Passes``.
        group: the ranks that share the rows, this one being ``rank`` of ``size``.
        on_pass: called when a pass begins.
    """

    def __init__(
        self,
        *,
        dtype: str,
        micro_batch_tokens: int,
        pad_id: int,
        device: torch.device,
        group: dist.ProcessGroup,
        rank: int,
        size: int,
        on_pass: Callable[[], None],
    ) -> None:
        super().__init__(dtype=dtype, micro_batch_tokens=micro_batch_tokens, pad_id=pad_id, device=device)
        self._group = group
        self._rank = rank
        self._size = size
        self._on_pass = on_pass

    def micro_batches(self, rows: Sequence[Row], still: Container[int] = ()) -> Iterator[MicroBatch]:
        """See ``Passes``; rows that are ``still`` go with the others, since each pass is every rank's."""
        lengths = [row.length for row in rows]
        cuts = dealt_micro_batches(lengths, self._size, self._budget)
        mine = cuts[self._rank]
        shortest = min(range(len(rows)), key=lambda index: (lengths[index], index), default=0)
        for number in range(max(map(len, cuts))):
            self._on_pass()
            idle = number >= len(mine)
            batch = micro_batch(rows, [shortest] if idle else mine[number], pad_id=self._pad_id, device=self.device)
            yield replace(batch, idle=idle)

    def share(self, rows: Sequence[Row]) -> MicroBatch:
        """Return all of this rank's rows as one micro-batch; somebody's shortest, which is idle, when it has none."""
        lengths = [row.length for row in rows]
        hand = deal(lengths, self._size)[self._rank]
        mine = hand or [min(range(len(rows)), key=lambda index: (lengths[index], index))]
        self._on_pass()
        return replace(micro_batch(rows, mine, pad_id=self._pad_id, device=self.device), idle=not hand)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' scalars, in float64 and with the same bits everywhere."""
        found = value.detach().double()
        dist.all_reduce(found, group=self._group)
        return found

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()  # FSDP2 casts

    def complete(self, rows: Sequence[Row], values: list[Floats]) -> list[Floats]:
        """Return the values of all rows: each rank's own beside zeros, added up, which is exact."""
        sizes = [len(row.response_ids) for row in rows]
        flat = np.zeros(sum(sizes), np.float32)
        ends = np.cumsum(np.asarray(sizes, np.int64))
        for value, end in zip(values, ends, strict=True):
            flat[end - len(value) : end] = value
        total = torch.from_numpy(flat).to(self.device)
        dist.all_reduce(total, group=self._group)
        return np.split(total.cpu().numpy(), ends[:-1])

    def shares(self) -> list[list[list[int]]]:
        found = gather_bytes(msgspec.msgpack.encode(self.cuts), self._group, self._size, self.device)
        return [msgspec.msgpack.decode(data, type=list[list[int]]) for data in found]

    def add_up(self, sums: Mapping[str, float]) -> dict[str, float]:
        total: dict[str, float] = {}
        for found in gather_bytes(msgspec.msgpack.encode(dict(sums)), self._group, self._size, self.device):
            for name, value in msgspec.msgpack.decode(found, type=dict[str, float]).items():
                total[name] = total.get(name, 0.0) + value
        return total


def gather_bytes(data: bytes, group: dist.ProcessGroup, size: int, device: torch.device) -> list[bytes]:
    """Return each rank's ``data``, in the order of ranks."""
    mine = torch.tensor(list(data), dtype=torch.uint8, device=device)
    length = torch.tensor([len(data)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    most = max(int(n) for n in lengths)
    padded = mine.new_zeros(most)
    padded[: len(data)] = mine
    found = [torch.zeros_like(padded) for _ in range(size)]
    dist.all_gather(found, padded, group=group)
    return [bytes(part[: int(n)].cpu().numpy()) for part, n in zip(found, lengths, strict=True)]
