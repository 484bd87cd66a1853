"""The memory that weights travel in.

Buckets are allocated and touched once and used for every sync: a page that was never touched costs ten times the copy
into it. Digests are computed on the pieces just copied, while they are in the cache.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from rlctl.sync.digest import NO_HASHER, PIECE, Bytes, Hasher
from rlctl.sync.tensor_meta import BucketMeta

NOWHERE: Mapping[int, torch.Tensor] = MappingProxyType({})


class FilledBucket(NamedTuple):
    """A bucket's description and the used part of its bytes (uint8); ``placed``: number of a chunk -> its bytes, when
    they are elsewhere."""

    meta: BucketMeta
    data: torch.Tensor
    placed: Mapping[int, torch.Tensor] = NOWHERE


class Buffer(NamedTuple):
    """A bucket's memory; on the CPU also as an array, whose slices cost a tenth of a tensor's."""

    tensor: torch.Tensor
    array: Bytes | None

    @classmethod
    def of(cls, memory: torch.Tensor) -> Buffer:
        """Return the buffer of a uint8 tensor."""
        return cls(memory, memory.numpy() if memory.device.type == "cpu" else None)


def allocate(nbytes: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return ``nbytes`` of touched memory as a uint8 tensor; on the CPU in huge pages where the system grants them."""
    if torch.device(device).type != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    tensor = torch.frombuffer(map_memory(nbytes), dtype=torch.uint8)
    touch(tensor)
    return tensor[:nbytes]


def map_memory(nbytes: int) -> mmap.mmap:
    """Return ``nbytes`` of untouched host memory, at least one, in huge pages where the system grants them."""
    # Private: the default, a shared mapping, gets no huge pages.
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def touch(memory: torch.Tensor) -> None:
    """Make the system map every page of a uint8 CPU tensor now, keeping its content."""
    memory[:: mmap.PAGESIZE].add_(0)


class Buckets:
    """A few equal buckets, used in turn.

    Args:
        nbytes: size of one.
        count: two let one be filled while the other is sent.
        memory: uint8 tensors to use instead of fresh ones (the slots of a shared segment).
        device: where fresh ones are allocated.
    """

    def __init__(
        self,
        nbytes: int,
        count: int = 2,
        *,
        memory: list[torch.Tensor] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.nbytes = nbytes
        self.buffers = memory if memory is not None else [allocate(nbytes, device) for _ in range(count)]
        assert all(b.dtype == torch.uint8 and b.numel() >= nbytes for b in self.buffers)

    def acquire(self, index: int) -> torch.Tensor:
        """Return the buffer for bucket ``index`` of a sync."""
        return self.buffers[index % len(self.buffers)]


def flat_bytes(tensor: torch.Tensor) -> Bytes | None:
    """Return a CPU tensor's own bytes as a uint8 array, or None when they do not lie in the order of its elements."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.dim() == 0:
        plain = plain.reshape(1)
    return plain.view(torch.uint8).numpy().reshape(-1)


def copy_bytes(target: torch.Tensor, source: torch.Tensor, hashing: Hasher) -> None:
    """Copy a uint8 tensor into another, hashing what was written piece by piece."""
    if target.device.type != "cpu" or source.device.type != "cpu":
        target.copy_(source)
        hash_bytes(target, hashing)
        return
    copy_array(target.numpy(), source.numpy(), hashing)


def copy_array(to: Bytes, out_of: Bytes, hashing: Hasher) -> None:
    """Copy a uint8 array into another, hashing what was written piece by piece."""
    nbytes = len(to)
    for begin in range(0, nbytes, PIECE):
        piece = to[begin : begin + PIECE]
        np.copyto(piece, out_of[begin : begin + PIECE])
        hashing.update(piece)


def hash_bytes(data: torch.Tensor, hashing: Hasher) -> None:
    """Hash a uint8 tensor; on another device its bytes come to the host first."""
    if hashing is not NO_HASHER:
        hashing.update(data.cpu().numpy())
