"""Where each tensor of a stream goes: which bucket, which offset, in how many pieces. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlctl.errors import UsageError
from rlctl.sync.tensor_meta import ALIGN, Chunk, TensorMeta
from rlctl.units import format_bytes

# A tensor that must be cut starts in what is left of a bucket only if that is worth a piece of its own.
MIN_PIECE_SHARE = 8


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment of a bucket."""
    return -(-nbytes // ALIGN) * ALIGN


class Cutter:
    """Says where each tensor of a stream goes: which bucket, which offset, in how many pieces.

    A tensor that fits in a bucket is never cut: it goes to the next bucket when the current one has no room. A larger
    one is cut at multiples of 256 bytes; with ``split=False`` it gets a bucket of its own, larger than the others.
    With ``fill=True`` any tensor is cut where a bucket ends, so that all buckets but the last are full.
    """

    def __init__(self, bucket_nbytes: int, *, split: bool = True, fill: bool = False) -> None:
        assert not fill or (split and bucket_nbytes % ALIGN == 0)
        if bucket_nbytes < ALIGN:
            raise UsageError(f"a bucket of {bucket_nbytes} bytes is too small", fix=f"at least {ALIGN} bytes")
        self.bucket_nbytes = bucket_nbytes
        self.bucket = 0
        self.used = 0
        self._split = split
        self._fill = fill

    def place(self, meta: TensorMeta) -> Iterator[tuple[int, Chunk]]:
        """Yield (bucket index, chunk) for each piece of ``meta``; a zero-size tensor is one empty piece."""
        nbytes, start = meta.nbytes, 0
        if nbytes > self.bucket_nbytes and not self._split:
            self._seal()
            yield self._take(meta, 0, nbytes)
            self._seal()
            return
        room = self.bucket_nbytes - self.used
        least = max(self.bucket_nbytes // MIN_PIECE_SHARE, ALIGN) if nbytes > self.bucket_nbytes else nbytes
        if room < (min(nbytes, ALIGN) if self._fill else least):
            self._seal()
        while True:
            room = self.bucket_nbytes - self.used
            size = nbytes - start if nbytes - start <= room else room // ALIGN * ALIGN
            yield self._take(meta, start, size)
            start += size
            if start >= nbytes:
                return
            self._seal()

    def _take(self, meta: TensorMeta, start: int, nbytes: int) -> tuple[int, Chunk]:
        chunk = Chunk(meta, start, nbytes, self.used)
        self.used = aligned(self.used + nbytes)
        return self.bucket, chunk

    def _seal(self) -> None:
        if self.used:
            self.bucket += 1
            self.used = 0


def plan_buckets(metas: Iterable[TensorMeta], bucket_nbytes: int, *, split: bool = True) -> list[list[Chunk]]:
    """Return the chunks of every bucket of a sync, as ``Packer`` will cut them."""
    cutter = Cutter(bucket_nbytes, split=split)
    buckets: list[list[Chunk]] = []
    for meta in metas:
        for bucket, chunk in cutter.place(meta):
            while len(buckets) <= bucket:
                buckets.append([])
            buckets[bucket].append(chunk)
    return buckets


def flat_layout(metas: Iterable[TensorMeta]) -> tuple[list[Chunk], int]:
    """Return every tensor's place in one flat block of memory, and the block's size in bytes."""
    chunks, total = [], 0
    for meta in metas:
        chunks.append(Chunk(meta, 0, meta.nbytes, total))
        total = aligned(total + meta.nbytes)
    return chunks, total


def require_bucket(metas: Iterable[TensorMeta], bucket_nbytes: int, *, where: str = "sync.bucket_size") -> None:
    """Raise UsageError, with the least size that would do, when a tensor is larger than a bucket that cannot be split.

    Called before the first step by backends that move a tensor in one piece.
    """
    largest = max(metas, key=lambda m: m.nbytes, default=None)
    if largest is not None and largest.nbytes > bucket_nbytes:
        least = -(-largest.nbytes // (1 << 20))
        raise UsageError(
            f"tensor {largest.name} has {format_bytes(largest.nbytes)}, more than a bucket of "
            f"{format_bytes(bucket_nbytes)}",
            where=where,
            fix=f"at least {least}MiB, or a backend that splits tensors",
        )
