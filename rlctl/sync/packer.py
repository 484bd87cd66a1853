"""Packing a stream of named tensors into buckets of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from rlctl.sync.buckets import Buffer, FilledBucket, copy_array, copy_bytes, flat_bytes, hash_bytes
from rlctl.sync.cutting import Cutter
from rlctl.sync.digest import NO_HASHER, Hasher, SyncDigest, Verify, bind, hasher
from rlctl.sync.runs import APART_NBYTES
from rlctl.sync.tensor_meta import BucketMeta, Chunk, SyncSummary, TensorMeta

Stream = Iterable[tuple[str, torch.Tensor]]


class Known(NamedTuple):
    """What was worked out of a tensor: its pieces, as (bucket, chunk, its bytes where they are, if they stay there),
    between two positions (bucket, bytes used)."""

    meta: TensorMeta
    source: Source
    pieces: list[tuple[int, Chunk, torch.Tensor | None]]
    begin: tuple[int, int]
    end: tuple[int, int]


class Packer:
    """Fills buckets from a stream, each byte copied once. One Packer is one sync.

    Args:
        bucket_nbytes: size of a bucket.
        acquire: gives the buffer for bucket k, waiting until nothing reads it any more (``Buckets.acquire`` does not
            wait; ``RingProducer.acquire`` does).
        version: of the weights that are sent.
        base_version: version that the stream is a delta against, else None.
        verify: what is hashed.
        stays: whether a tensor keeps its memory and bits until all is sent. Its large pieces are not copied, but
            ``placed`` where they are.
        known: what was worked out of such tensors by the last Packer of this size of bucket.
    """

    def __init__(
        self,
        bucket_nbytes: int,
        acquire: Callable[[int], torch.Tensor],
        *,
        version: int,
        base_version: int | None = None,
        verify: Verify = "full",
        stays: Callable[[str, torch.Tensor], bool] | None = None,
        known: dict[str, Known] | None = None,
    ) -> None:
        self._known = {} if known is None else known
        self._stays = stays
        self._placed: dict[int, torch.Tensor] = {}
        self._cutter = Cutter(bucket_nbytes)
        self._acquire = acquire
        self._version = version
        self._base_version = base_version
        self._verify = verify
        self._digest = SyncDigest(version, base_version)
        self._buffers: dict[int, Buffer] = {}

    def pack(self, stream: Stream) -> Iterator[FilledBucket]:
        """Yield the buckets of ``stream`` in order; the last one carries the summary, also when the stream is empty.

        With n buffers, bucket k's buffer is filled again when bucket k + n is asked for: a consumer that sends in the
        background ends with k before that, or waits in ``acquire``.
        """
        index, chunks = 0, list[Chunk]()
        buffer = self._buffer(0)
        used = 0
        for name, tensor in stream:
            meta, source, pieces, _, _ = self._pieces(name, tensor)
            hashing = hasher(meta, self._verify, self._version)
            for bucket, placed, view in pieces:
                if bucket != index:
                    yield self._filled(index, chunks, buffer, used)
                    index, chunks = bucket, []
                    buffer = self._buffer(index)
                if view is None:
                    source.copy(placed, buffer, hashing)
                else:
                    hash_bytes(view, hashing)
                    self._placed[len(chunks)] = view
                used = placed.offset + placed.nbytes
                chunks.append(self._close(meta, placed, hashing))
        yield self._filled(index, chunks, buffer, used if chunks else 0, self._digest.summary(self._verify))

    def _pieces(self, name: str, tensor: torch.Tensor) -> Known:
        """Return where a tensor's pieces go; what stays where it was, after the same tensors, is known."""
        stays = self._stays is not None and self._stays(name, tensor)
        cutter, last = self._cutter, self._known.get(name) if stays else None
        begin = (cutter.bucket, cutter.used)
        if last is not None and last.begin == begin and last.source.is_of(tensor):
            cutter.bucket, cutter.used = last.end
            return last
        meta, source = TensorMeta.of(name, tensor), Source(tensor)
        pieces = [
            (bucket, chunk, source.view(chunk) if stays and chunk.nbytes >= APART_NBYTES else None)
            for bucket, chunk in cutter.place(meta)
        ]
        found = Known(meta, source, pieces, begin, (cutter.bucket, cutter.used))
        if stays:  # its memory is kept in any case
            self._known[name] = found
        return found

    def _buffer(self, index: int) -> Buffer:
        memory = self._acquire(index)
        found = self._buffers.get(id(memory))
        if found is None:
            found = self._buffers[id(memory)] = Buffer.of(memory)
        return found

    def _filled(
        self, index: int, chunks: list[Chunk], buffer: Buffer, used: int, summary: SyncSummary | None = None
    ) -> FilledBucket:
        data = buffer.tensor if used == buffer.tensor.numel() else buffer.tensor[:used]
        placed, self._placed = self._placed, {}
        return FilledBucket(BucketMeta(index, self._version, used, tuple(chunks), summary), data, placed)

    def _close(self, meta: TensorMeta, placed: Chunk, hashing: Hasher) -> Chunk:
        if not placed.ends:
            return placed
        if hashing is NO_HASHER:
            self._digest.add(meta, b"")
            return placed
        digest = bind(meta, hashing.content(), version=self._version, base_version=self._base_version)
        self._digest.add(meta, digest)
        return Chunk(meta, placed.start, placed.nbytes, placed.offset, digest)


class Source:
    """One tensor as it is copied out, piece by piece."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._of = (tensor, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        self._tensor = tensor.detach()
        self._array = flat_bytes(tensor)
        self._bytes: torch.Tensor | None = None

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is of this tensor, in order, where it lies now."""
        known, *layout = self._of
        return (
            known is tensor
            and self._array is not None
            and layout == [tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype]
        )

    def view(self, chunk: Chunk) -> torch.Tensor | None:
        """Return a piece's bytes where they are; None when they are not in order there, or not on the CPU."""
        if self._array is None:
            return None
        return torch.from_numpy(self._array[chunk.start : chunk.start + chunk.nbytes])

    def copy(self, chunk: Chunk, buffer: Buffer, hashing: Hasher) -> None:
        """Copy a piece to its place in ``buffer``, and hash it."""
        part = slice(chunk.offset, chunk.offset + chunk.nbytes)
        own = slice(chunk.start, chunk.start + chunk.nbytes)
        if self._array is not None and buffer.array is not None:
            copy_array(buffer.array[part], self._array[own], hashing)
        elif chunk.whole:  # strided elements go straight into the bucket
            target = buffer.tensor[part]
            target.view(self._tensor.dtype).view(self._tensor.shape).copy_(self._tensor)
            hash_bytes(target, hashing)
        else:
            if self._bytes is None:
                plain = self._tensor.resolve_conj().resolve_neg().contiguous()
                self._bytes = plain.reshape(-1).view(torch.uint8)
            copy_bytes(buffer.tensor[part], self._bytes[own], hashing)
