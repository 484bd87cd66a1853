"""A gloo group that counts the bytes of whatever goes into it and comes out of it."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


MADE: list[CountedGroup] = []


class CountedGroup(dist.ProcessGroup):
    """Bytes by (sender, receiver), ranks of the group, as this rank sees them."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.pairs: Counter[tuple[int, int]] = Counter()
        self.collectives = 0
        self._rank, self._size = rank, size
        MADE.append(self)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        self.pairs[self._rank, to] += nbytes(tensors)
        return self._inner.send(tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> Any:
        self.pairs[of, self._rank] += nbytes(tensors)
        return self._inner.recv(tensors, of, tag)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> Any:
        self.collectives += 1
        for other in range(self._size):
            if other != self._rank:
                self.pairs[self._rank, other] += nbytes([given])
                self.pairs[other, self._rank] += nbytes([given])
        return _base(self._inner)(output, given, options)

    def barrier(self, options: Any = None) -> Any:
        return self._inner.barrier(options) if options is not None else self._inner.barrier()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "counted"


def _base(group: Any) -> Any:
    return getattr(group, "all_gather_single", None) or group._allgather_base


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> CountedGroup:
    return CountedGroup(store, rank, size, timeout)


def register() -> None:
    """Make ``backend="counted"`` known to torch."""
    dist.Backend.register_backend("counted", _create, devices=["cpu"])


def all_pairs() -> Counter[tuple[int, int]]:
    """Bytes of all groups that were made, by ranks of the default group."""
    total: Counter[tuple[int, int]] = Counter()
    for group in MADE:
        ranks = dist.get_process_group_ranks(group)
        for (src, dst), count in group.pairs.items():
            total[ranks[src], ranks[dst]] += count
    return total


def reset() -> None:
    """Count from nothing."""
    for group in MADE:
        group.pairs.clear()
        group.collectives = 0
