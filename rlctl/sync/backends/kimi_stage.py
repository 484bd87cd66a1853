"""The host memory in which every trainer rank keeps its part of the weights that were sent last.

Each rank sees the whole stream and cuts it alike, into buckets that are full but for the last one. Bucket g belongs to
rank g mod owners: parts differ by one bucket at most, and rank after rank, bucket after bucket, tensors come in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from rlctl.sync.buckets import Buffer, FilledBucket, allocate, flat_bytes, hash_bytes
from rlctl.sync.cutting import Cutter
from rlctl.sync.digest import NO_HASHER, Hasher, SyncDigest, Verify, bind, hasher
from rlctl.sync.engine import Stream
from rlctl.sync.packer import Source
from rlctl.sync.tensor_meta import BucketMeta, Chunk, TensorMeta


@dataclass
class _Kept:
    """One bucket: its memory, and its chunks, each with the digest of its tensor's content where it ends."""

    buffer: Buffer
    used: int = 0
    chunks: list[tuple[Chunk, bytes]] = field(default_factory=list)


class HostStage:
    """One rank's part of one version. Its memory is allocated by the first and used again by later ones.

    Args:
        nbytes: of a bucket.
        pinned: in memory that a device copies out of by itself.

    Attributes:
        version: whose weights are here, all of this rank's part; None while they are not.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._nbytes = nbytes
        self._pinned = pinned
        self._memory: list[Buffer] = []
        self._kept: list[_Kept] = []
        self._verify: Verify = "off"
        self.version: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are held."""
        return sum(buffer.tensor.numel() for buffer in self._memory)

    def fill(self, stream: Stream, *, version: int, verify: Verify, owner: int, owners: int) -> None:
        """Copy the part of rank ``owner`` of ``owners`` out of a stream, in the place of what was here."""
        self.version, self._kept, self._verify = None, [], verify
        cutter = Cutter(self._nbytes, fill=True)
        for name, tensor in stream:
            meta = TensorMeta.of(name, tensor)
            pieces = list(cutter.place(meta))
            # The rank that has a tensor's end knows its digest, so it hashes what others have of it.
            ends_here = pieces[-1][0] % owners == owner
            hashing = hasher(meta, verify, version) if ends_here else NO_HASHER
            source = Source(tensor)
            for bucket, chunk in pieces:
                if bucket % owners == owner:
                    self._keep(bucket // owners, chunk, source, hashing)
                elif ends_here:
                    _hash_piece(tensor, chunk, hashing)
        del self._memory[len(self._kept) :]
        self.version = version

    def buckets(self, base_version: int | None) -> Iterator[FilledBucket]:
        """Yield the buckets, at least one; the last has the summary of this part. ``base_version``: that receivers
        hold; their digests are bound to it."""
        assert self.version is not None
        digest = SyncDigest(self.version, base_version)
        kept = self._kept or [_Kept(Buffer.of(torch.empty(0, dtype=torch.uint8)))]
        for index, bucket in enumerate(kept):
            chunks = []
            for chunk, content in bucket.chunks:
                bound = b""
                if chunk.ends:
                    bound = bind(chunk.tensor, content, version=self.version, base_version=base_version)
                    digest.add(chunk.tensor, bound)
                chunks.append(Chunk(chunk.tensor, chunk.start, chunk.nbytes, chunk.offset, bound))
            summary = digest.summary(self._verify) if index + 1 == len(kept) else None
            meta = BucketMeta(index, self.version, bucket.used, tuple(chunks), summary)
            yield FilledBucket(meta, bucket.buffer.tensor[: bucket.used])

    def close(self) -> None:
        """Give the memory up."""
        self.version, self._kept, self._memory = None, [], []

    def _keep(self, place: int, chunk: Chunk, source: Source, hashing: Hasher) -> None:
        if place == len(self._kept):
            if place == len(self._memory):
                self._memory.append(Buffer.of(self._allocate()))
            self._kept.append(_Kept(self._memory[place]))
        kept = self._kept[place]
        source.copy(chunk, kept.buffer, hashing)
        kept.used = chunk.offset + chunk.nbytes
        kept.chunks.append((chunk, hashing.content() if chunk.ends else b""))

    def _allocate(self) -> torch.Tensor:
        return torch.zeros(self._nbytes, dtype=torch.uint8, pin_memory=True) if self._pinned else allocate(self._nbytes)


def _hash_piece(tensor: torch.Tensor, chunk: Chunk, hashing: Hasher) -> None:
    array = flat_bytes(tensor)
    own = slice(chunk.start, chunk.start + chunk.nbytes)
    if array is not None:
        hashing.update(array[own])
        return
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    hash_bytes(plain.reshape(-1).view(torch.uint8)[own], hashing)
