"""The memory of a switch: generation shards in one block, and two slots that slices are cut and received in."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from rlctl.hybrid.reshard.idle_memory import IdleMemory
from rlctl.keys.dtypes import dtype_nbytes, torch_dtype
from rlctl.sync.cutting import aligned

# Less than this is not worth pages of its own.
SMALL = 1 << 20

Shape = tuple[tuple[int, ...], str]


def block(nbytes: int, device: torch.device, idle: IdleMemory) -> torch.Tensor:
    """Return ``nbytes`` as a uint8 tensor; large ones on the CPU out of what is idle."""
    if device.type == "cpu" and nbytes >= SMALL:
        return idle.take(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def shards(wanted: Mapping[str, Shape], device: torch.device, idle: IdleMemory) -> tuple[dict[str, torch.Tensor], int]:
    """Return tensors of these shapes and safetensors dtypes, in one block of memory, and its bytes."""
    sizes = {name: dtype_nbytes(dtype, prod(shape)) for name, (shape, dtype) in wanted.items()}
    memory = block(sum(map(aligned, sizes.values())), device, idle)
    found, start = {}, 0
    for name, (shape, dtype) in wanted.items():
        part = memory[start : start + sizes[name]]
        found[name] = part.view(torch_dtype(dtype)).view(shape)
        start += aligned(sizes[name])
    return found, memory.numel()


class Slot:
    """Memory for the messages of one round."""

    def __init__(self, nbytes: int, device: torch.device, idle: IdleMemory) -> None:
        self._memory = block(nbytes, device, idle)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Size of the slot."""
        return self._memory.numel()

    def clear(self) -> None:
        """Use it anew."""
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return the next ``nbytes``, aligned for every dtype."""
        start = self._used
        self._used = start + aligned(nbytes)
        return self._memory[start : start + nbytes]
