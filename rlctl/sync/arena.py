"""Weights that live in shared memory, so that other processes of the node take them with one copy, or with none.

An arena is made of blocks. A block has one segment, and gets a second one when it is to be written while a reader still
uses the first: nothing that is read is ever overwritten. The first bytes of a segment count the writes into it, so that
a reader that was given up finds out what happened to its memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rlctl.sync.buckets import flat_bytes
from rlctl.sync.cutting import aligned
from rlctl.sync.deadline import Deadline
from rlctl.sync.shared_memory import Segment
from rlctl.sync.tensor_meta import ALIGN, TensorMeta

_SERIALS = itertools.count(1)
HEAD = ALIGN  # bytes before the first tensor
# A block for copies is this part of those before it, so that what it has too much is little, and large models have few
# blocks. A tensor that would fill as large a part of one, and does not fit in the last, gets a block of its own.
BLOCK_SHARE = 8
FIRST_BLOCK = 4 << 20
LARGEST_BLOCK = 256 << 20


class Readers(Protocol):
    """Who knows which segments are in use by readers."""

    def using(self, serial: int) -> list[str]:
        """Return the readers that use a segment now."""

    def wait_until_free(self, serial: int, deadline: Deadline) -> None:
        """Wait until no reader uses it. Raises DeadlineError, naming who still does."""


class Generation:
    """One segment, and the counter of writes into it.

    Attributes:
        serial: no other segment of this process has it.
    """

    def __init__(self, nbytes: int) -> None:
        self.serial = next(_SERIALS)
        self.segment = Segment.create(HEAD + nbytes, label="weights", own=True)
        self._count = write_count(self.segment)

    @property
    def writes(self) -> int:
        """The number of writes that have begun."""
        return int(self._count[0])

    @property
    def data(self) -> torch.Tensor:
        """The bytes of the tensors."""
        return self.segment.memory[HEAD:]

    def begin(self) -> None:
        """Say that it will be written."""
        self._count += 1


def write_count(segment: Segment) -> npt.NDArray[np.int64]:
    """Return the counter of a segment of an arena, one element, as it changes."""
    return segment.memory[:8].view(torch.int64).numpy()


class Block:
    """A stretch of an arena.

    Attributes:
        live: the tensors that live in it, at their offsets; a second segment takes them over.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.live: list[tuple[torch.Tensor, int]] = []
        self._generations = [Generation(nbytes)]
        self._address = self.current.data.data_ptr()

    @property
    def current(self) -> Generation:
        """The segment that has the weights."""
        return self._generations[0]

    @property
    def held_nbytes(self) -> int:
        """Bytes of memory in its segments."""
        return len(self._generations) * self.nbytes

    @property
    def serials(self) -> list[int]:
        """Of its segments."""
        return [generation.serial for generation in self._generations]

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return where ``nbytes`` at an address of this process lie in it, or None."""
        offset = address - self._address
        return offset if 0 <= offset <= self.nbytes - nbytes else None

    def make_writable(self, readers: Readers | None, deadline: Deadline) -> None:
        """Let the current segment be one that no reader uses: by taking another, or by waiting for one."""
        if readers is None or not readers.using(self.current.serial):
            return
        if len(self._generations) == 1:
            self._generations.append(Generation(self.nbytes))
        other = self._generations[1]
        if readers.using(other.serial):
            readers.wait_until_free(other.serial, deadline)
        self._generations.reverse()
        self._address = self.current.data.data_ptr()
        if self.live:
            self.current.begin()
            self.current.data.copy_(other.data)
            self.settle()

    def settle(self) -> None:
        """Let the tensors that live here have the memory of the current segment."""
        for tensor, offset in self.live:
            place = self.current.data[offset : offset + tensor.nbytes]
            tensor.data = place.view(tensor.dtype).view(tensor.shape)

    def close(self) -> None:
        """Give the segments up; tensors in them keep their memory."""
        for generation in self._generations:
            generation.segment.close()


class Spot(NamedTuple):
    """A place in an arena."""

    block: Block
    offset: int


class WeightArena:
    """One process's arena; it belongs to one thread at a time.

    Attributes:
        readers: set by who serves them.
    """

    def __init__(self) -> None:
        self.readers: Readers | None = None
        self._homes: list[Block] = []
        self._copies = _Copies()

    @property
    def blocks(self) -> list[Block]:
        """All blocks."""
        return [*self._homes, *self._copies.blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of memory beside the weights themselves: copies, and second segments."""
        return sum(b.held_nbytes for b in self.blocks) - sum(b.nbytes for b in self._homes)

    def serials(self) -> set[int]:
        """Return the serials of all segments."""
        return {serial for block in self.blocks for serial in block.serials}

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move CPU tensors here: they stay the objects that they are and get other memory (``.data``), parameters of a
        model, say. Tensors that overlap keep doing so. Those whose elements do not lie in order, or which are here
        already, stay where they are.
        """
        movable = [t for t in tensors if t.numel() and flat_bytes(t) is not None and not self._find(t)]
        clusters = _overlapping(movable)
        total = sum(aligned(c.nbytes) for c in clusters)
        if not total:
            return
        block = Block(total)
        block.current.begin()
        place = 0
        for cluster in clusters:
            for tensor in cluster.tensors:
                offset = place + tensor.data_ptr() - cluster.address
                target = block.current.data[offset : offset + tensor.nbytes]
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
                block.live.append((tensor, offset))
            place += aligned(cluster.nbytes)
        block.settle()
        self._homes.append(block)

    def locate(self, tensor: torch.Tensor) -> Spot | None:
        """Return where a contiguous tensor lies, if its memory is here and begins at a multiple of 256."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        spot = self._find(tensor)
        return spot if spot is not None and spot.offset % ALIGN == 0 else None

    def _find(self, tensor: torch.Tensor) -> Spot | None:
        address = tensor.data_ptr()
        for block in self._homes:
            offset = block.offset_of(address, tensor.nbytes)
            if offset is not None:
                return Spot(block, offset)
        return None

    def begin_step(self, deadline: Deadline) -> None:
        """Call this before weights that live here are changed (an optimizer step), if readers may use them in place.

        Where one does, the weights move to the second segment (one copy); where one still uses that, too, it is waited
        for: DeadlineError names it.
        """
        for block in self._homes:
            block.make_writable(self.readers, deadline)
            block.current.begin()

    def begin_copies(self, deadline: Deadline) -> None:
        """Start a sync's copies: those of the last one lie at the same places, if the same tensors come again."""
        self._copies.rewind()
        for block in self._copies.blocks:
            block.make_writable(self.readers, deadline)
            block.current.begin()

    def room(self, meta: TensorMeta) -> Spot:
        """Return a place for a copy of the next tensor that does not live here."""
        return self._copies.room(meta.nbytes)

    def end_copies(self) -> None:
        """End a sync's copies: give up the blocks that it did not need."""
        for block in self._copies.cut():
            block.close()

    def close(self) -> None:
        """Give everything up; tensors that live here keep their memory."""
        for block in self.blocks:
            block.close()
        self._homes, self._copies = [], _Copies()


class _Copies:
    """Blocks filled one after the other, each sync from the beginning; beside them those of one tensor each."""

    def __init__(self) -> None:
        self._shared: list[Block] = []
        self._single: list[Block] = []
        self.rewind()

    @property
    def blocks(self) -> list[Block]:
        return [*self._shared, *self._single]

    def rewind(self) -> None:
        self._filled = self._singles = self._used = self._held = 0

    def room(self, nbytes: int) -> Spot:
        if not self._filled or self._used + nbytes > self._shared[self._filled - 1].nbytes:
            size = aligned(min(max(self._held // BLOCK_SHARE, FIRST_BLOCK), LARGEST_BLOCK))
            if nbytes * BLOCK_SHARE >= size:
                block = self._take(self._single, self._singles, aligned(nbytes))
                self._singles += 1
                return Spot(block, 0)
            self._take(self._shared, self._filled, size)
            self._filled, self._used = self._filled + 1, 0
        spot = Spot(self._shared[self._filled - 1], self._used)
        self._used = aligned(self._used + nbytes)
        return spot

    def cut(self) -> list[Block]:
        """Return, and forget, the blocks that this sync did not need."""
        rest = self._shared[self._filled :] + self._single[self._singles :]
        del self._shared[self._filled :], self._single[self._singles :]
        return rest

    def _take(self, blocks: list[Block], place: int, nbytes: int) -> Block:
        """Return the block at ``place``, one of ``nbytes``; a new one, unless the last sync left such a one there."""
        if place == len(blocks) or blocks[place].nbytes != nbytes:
            block = Block(nbytes)
            block.current.begin()
            blocks.insert(place, block)
        self._held += nbytes
        return blocks[place]


class _Cluster(NamedTuple):  # tensors whose bytes overlap
    address: int
    nbytes: int
    tensors: list[torch.Tensor]


def _overlapping(tensors: Iterable[torch.Tensor]) -> list[_Cluster]:
    clusters: list[_Cluster] = []
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        address = tensor.data_ptr()
        last = clusters[-1] if clusters else None
        if last is not None and address < last.address + last.nbytes:
            nbytes = max(last.nbytes, address + tensor.nbytes - last.address)
            clusters[-1] = _Cluster(last.address, nbytes, [*last.tensors, tensor])
        else:
            clusters.append(_Cluster(address, tensor.nbytes, [tensor]))
    return clusters
