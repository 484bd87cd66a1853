"""Where a bucket's bytes go when it is read: worked out once, and again when it, or its place, has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from rlctl.sync.backends.nixl_agent import Batch, Place
from rlctl.sync.errors import CorruptedError
from rlctl.sync.runs import memory_of, runs
from rlctl.sync.tensor_meta import BucketMeta

# Most bytes read in one call: over shared memory it copies them itself, and cannot be given up.
_AT_ONCE = 64 << 20


class Landing:
    """See the module.

    Args:
        buffer: for what is not placed.
        placed: the chunks that are read right where they belong.
        inline: whether the small runs come with the announcement.

    Attributes:
        here: where the runs go that are read.
        lent: whether one of them is in the buffer.
    """

    def __init__(
        self, meta: BucketMeta, buffer: torch.Tensor, placed: Mapping[int, torch.Tensor], *, inline: bool
    ) -> None:
        self._for = (meta.chunks, buffer, placed)
        self._inline = inline
        self.here: list[Place] = []
        self.lent = False
        self._small: list[torch.Tensor] = []
        for run in runs(meta):
            memory = memory_of(run, buffer, placed)
            if run.chunk is None and inline:
                self._small.append(memory)
            else:
                self.here.append(Place.of(memory))
                self.lent = self.lent or run.chunk not in placed
        self._arrays = [memory.numpy() for memory in self._small if memory.device.type == "cpu"]
        self._inline_nbytes = sum(memory.numel() for memory in self._small)
        self._there: Sequence[Place] = ()
        self._batches: list[Batch] = []

    def fits(self, meta: BucketMeta, buffer: torch.Tensor, placed: Mapping[int, torch.Tensor], *, inline: bool) -> bool:
        """Whether it is for this bucket in this place."""
        chunks, into, places = self._for
        return chunks is meta.chunks and into is buffer and places is placed and self._inline == inline

    def apart(
        self, meta: BucketMeta, placed: Mapping[int, torch.Tensor], there: Sequence[Place]
    ) -> Sequence[Batch] | None:
        """Return what is to be read when the bucket is as it was last time, and none of that goes to the buffer, which
        may still be in use; else None."""
        chunks, _, places = self._for
        known = chunks is meta.chunks and places is placed and not self.lent and self._there == there
        return self._batches if known else None

    def fill(self, inline: bytes) -> None:
        """Bring the small runs' bytes where they belong. Raises CorruptedError when there are more or fewer."""
        if len(inline) != self._inline_nbytes:
            raise CorruptedError(f"{len(inline)} bytes came where {self._inline_nbytes} were due")
        if not inline:
            return
        data, cut = np.frombuffer(inline, np.uint8), 0
        if len(self._arrays) == len(self._small):
            for array in self._arrays:
                array[:] = data[cut : cut + len(array)]
                cut += len(array)
            return
        found = torch.from_numpy(data.copy())
        for memory in self._small:
            memory.copy_(found[cut : cut + memory.numel()])
            cut += memory.numel()

    def batches(self, there: Sequence[Place], index: int, peer: str) -> list[Batch]:
        """Return what is to be read in one call each, as pairs of (here, there). Raises CorruptedError when the sizes
        differ."""
        if not self._batches or self._there != there:
            if [place.nbytes for place in self.here] != [place.nbytes for place in there]:
                raise CorruptedError(f"bucket {index} does not lie where {peer} says it does")
            self._there = there
            self._batches = [Batch(pairs) for pairs in _batches(list(zip(self.here, there, strict=True)))]
        return self._batches


def _batches(pairs: Sequence[tuple[Place, Place]]) -> Iterator[list[tuple[Place, Place]]]:
    batch, nbytes = list[tuple[Place, Place]](), 0
    for here, there in pairs:
        for start in range(0, here.nbytes, _AT_ONCE):
            size = min(_AT_ONCE, here.nbytes - start)
            if nbytes + size > _AT_ONCE:
                yield batch
                batch, nbytes = [], 0
            batch.append((here.part(start, size), there.part(start, size)))
            nbytes += size
    if batch:
        yield batch
