"""The ranks of one tensor-parallel replica: what they say to each other while they generate, and how much of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.errors import RlctlError


class CollectiveError(RlctlError):
    """A collective of generation that did not end in time, or whose other side is gone."""


@dataclass
class Said:
    """What this rank sent in collectives.

    Attributes:
        calls: how many, by kind (``all_reduce``, ``all_gather``, ``broadcast``).
        nbytes: bytes that a ring makes this rank send for them.
        seconds: spent in them, waiting included.
        longest: seconds of the longest one.
    """

    calls: dict[str, int] = field(default_factory=dict)
    nbytes: float = 0.0
    seconds: float = 0.0
    longest: float = 0.0


class TensorGroup:
    """This rank's seat among the ranks of a replica, which make the same calls in the same order.

    Args:
        group: the ranks; None when this one is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.said = Said()

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, in the place of this one."""
        if self.size > 1:
            with self._told("all_reduce", 2 * part.nbytes * (self.size - 1) / self.size):
                dist.all_reduce(part, group=self._group)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Return all ranks' tensors, of one shape, stacked in the order of ranks."""
        if self.size == 1:
            return part[None]
        part = part.contiguous()
        found = part.new_empty((self.size, *part.shape))
        with self._told("all_gather", part.nbytes * (self.size - 1)):
            dist.all_gather(list(found), part, group=self._group)
        return found

    def firsts(self, values: Tensor) -> Tensor:
        """Return the first rank's tensor, in the place of this one."""
        if self.size > 1:
            assert self._group is not None
            with self._told("broadcast", values.nbytes * (self.size - 1) / self.size):
                dist.broadcast(values, dist.get_global_rank(self._group, 0), group=self._group)
        return values

    @contextmanager
    def _told(self, kind: str, nbytes: float) -> Iterator[None]:
        begin = time.perf_counter()
        with naming(kind):
            yield
        took = time.perf_counter() - begin
        said = self.said
        said.calls[kind] = said.calls.get(kind, 0) + 1
        said.nbytes += nbytes
        said.seconds += took
        said.longest = max(said.longest, took)


@contextmanager
def naming(kind: str) -> Iterator[None]:
    """Raise CollectiveError for what torch.distributed raises."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{kind} between ranks failed: {error}") from error


def replicas(ranks: Sequence[int], tp: int, *, timeout: float | None = None) -> dist.ProcessGroup | None:
    """Return the group of this rank's replica; every rank makes the call. None for replicas of one, or outside.

    Args:
        ranks: of all replicas, one replica's ``tp`` after the other, in ascending order.
        timeout: seconds that one collective may take; default: that of the default group.
    """
    if tp == 1:
        return None
    mine = None
    for first in range(0, len(ranks), tp):
        members = list(ranks[first : first + tp])
        group = dist.new_group(members, timeout=None if timeout is None else timedelta(seconds=timeout))
        if dist.get_rank() in members:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine


def same_everywhere(values: Tensor, group: TensorGroup) -> bool:
    """Whether all ranks of a replica have the same bits."""
    found = group.gather(values.reshape(-1).view(torch.uint8))
    return bool((found == found[0]).all())
