"""A stream of tensors as extents of an arena: those that live there stay where they are, others are copied into it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlctl.sync.arena import Block, WeightArena
from rlctl.sync.buckets import Buffer, FilledBucket, hash_bytes
from rlctl.sync.cutting import aligned
from rlctl.sync.deadline import Deadline
from rlctl.sync.digest import Hasher, SyncDigest, Verify, bind, hasher
from rlctl.sync.packer import Source, Stream
from rlctl.sync.tensor_meta import BucketMeta, Chunk, TensorMeta

# An extent is told when it is so large; earlier when its bytes were copied or hashed, so that receivers find them in
# the cache.
EXTENT_NBYTES = 256 << 20
TOUCHED_NBYTES = 8 << 20


class ArenaPacker:
    """Makes extents. One ArenaPacker is one sync.

    Args:
        arena: where the tensors are, or go.
        deadline: for readers to let memory go that is to be written.
        version: of the weights that are sent.
        base_version: version that the stream is a delta against, else None.
        verify: what is hashed.
        extent_nbytes: after so many bytes an extent ends.
    """

    def __init__(
        self,
        arena: WeightArena,
        deadline: Deadline,
        *,
        version: int,
        base_version: int | None,
        verify: Verify,
        extent_nbytes: int = EXTENT_NBYTES,
    ) -> None:
        self._arena = arena
        self._deadline = deadline
        self._version = version
        self._base_version = base_version
        self._verify = verify
        self._digest = SyncDigest(version, base_version)
        self._extent_nbytes = min(extent_nbytes, EXTENT_NBYTES)
        self._index = 0

    def pack(self, stream: Stream) -> Iterator[FilledBucket]:
        """Yield the extents of ``stream`` in order; the last one carries the summary, also when the stream is empty."""
        self._arena.begin_copies(self._deadline)
        extent = _Extent(self._extent_nbytes)
        for name, tensor in stream:
            meta = TensorMeta.of(name, tensor)
            nbytes = meta.nbytes
            if nbytes == 0:
                extent.chunks.append(Chunk(meta, 0, 0, 0, self._bound(meta, hasher(meta, self._verify, self._version))))
                continue
            spot = self._arena.locate(tensor)
            lives_there = spot is not None
            block, offset = spot or self._arena.room(meta)
            if not extent.takes(block, offset):
                yield self._told(extent)
                extent = _Extent(self._extent_nbytes)
            hashing = hasher(meta, self._verify, self._version)
            if not lives_there:
                Source(tensor).copy(Chunk(meta, 0, nbytes, offset), Buffer.of(block.current.data), hashing)
            elif self._verify != "off":
                hash_bytes(block.current.data[offset : offset + nbytes], hashing)
            digest = self._bound(meta, hashing)
            extent.add(block, offset, meta, nbytes, digest, touched=nbytes if digest or not lives_there else 0)
        self._arena.end_copies()
        yield self._told(extent, last=True)

    def _bound(self, meta: TensorMeta, hashing: Hasher) -> bytes:
        digest = bind(meta, hashing.content(), version=self._version, base_version=self._base_version)
        self._digest.add(meta, digest)
        return digest

    def _told(self, extent: _Extent, *, last: bool = False) -> FilledBucket:
        summary = self._digest.summary(self._verify) if last else None
        meta = BucketMeta(self._index, self._version, extent.used, tuple(extent.chunks), summary)
        self._index += 1
        return FilledBucket(meta, extent.data())


class _Extent:
    """Tensors that lie one after the other."""

    def __init__(self, nbytes: int) -> None:
        self._limit, self._touched_limit = nbytes, min(nbytes, TOUCHED_NBYTES)
        self.chunks: list[Chunk] = []
        self.used = 0
        self._block: Block | None = None
        self._start = 0
        self._touched = 0

    def takes(self, block: Block, offset: int) -> bool:
        if self._block is None:
            return True
        follows = block is self._block and offset == self._start + aligned(self.used)
        return follows and self._touched < self._touched_limit and self.used < self._limit

    def add(self, block: Block, offset: int, meta: TensorMeta, nbytes: int, digest: bytes, *, touched: int) -> None:
        if self._block is None:
            self._block, self._start = block, offset
        self.chunks.append(Chunk(meta, 0, nbytes, offset - self._start, digest))
        self.used = offset - self._start + nbytes
        self._touched += touched

    def data(self) -> torch.Tensor:
        if self._block is None:
            return torch.empty(0, dtype=torch.uint8)
        return self._block.current.data[self._start : self._start + self.used]
