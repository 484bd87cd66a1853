"""Host memory that stays mapped while nothing uses it."""

from __future__ import annotations

import mmap
import weakref
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rlctl.sync.buckets import map_memory


class _Mapping(NamedTuple):
    """Memory, and what is alive as long as a tensor has it."""

    memory: mmap.mmap
    user: weakref.ref[npt.NDArray[np.uint8]]


class IdleMemory:
    """Memory of one process for what comes and goes with every switch.

    While nothing uses it the system may take its pages when it runs short; those that are left need not be cleared
    before they are written again, which takes longer than a copy into them. What a tensor still has is never given to
    another.
    """

    def __init__(self) -> None:
        self._mappings: list[_Mapping] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` as a uint8 tensor, with anything in it."""
        fitting = [m for m in self._mappings if len(m.memory) >= nbytes and m.user() is None]
        last = min(fitting, key=lambda mapping: len(mapping.memory), default=None)
        if last is not None:
            self._mappings.remove(last)
        memory = map_memory(nbytes) if last is None else last.memory
        array = np.frombuffer(memory, np.uint8, nbytes)
        self._mappings.append(_Mapping(memory, weakref.ref(array)))
        return torch.from_numpy(array)

    def rest(self) -> None:
        """Let the system have the pages of what nobody uses. What somebody does is theirs from now on."""
        self._mappings = [mapping for mapping in self._mappings if mapping.user() is None]
        for mapping in self._mappings:
            mapping.memory.madvise(mmap.MADV_FREE)
