"""Digests of tensors and of whole syncs.

A tensor's bytes are hashed in order by XXH3 (128 bits, not cryptographic: it finds accidents, not forgeries; a peer
is kept out by the run's token). The result is bound to the tensor's name, dtype and shape and to the version and base
version of the sync, so that swapped words, a dropped or repeated bucket, a stale base and a misnamed tensor all show.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128, xxh3_128_digest

from rlctl.sync.errors import CorruptedError
from rlctl.sync.tensor_meta import SyncSummary, TensorMeta

Verify = Literal["full", "sampled", "off"]
Bytes = npt.NDArray[np.uint8]
DIGEST_BYTES = 16
# Small enough that a piece that was just copied is hashed from the cache, large enough to hide the calls.
PIECE = 512 << 10
# verify=sampled looks at one block of each group, and at the first and last blocks of every tensor.
SAMPLE_BLOCK = 64 << 10
SAMPLE_GROUP = 16


class Hasher(Protocol):
    """Takes a tensor's bytes in order."""

    def update(self, piece: Bytes) -> None:
        """Take the next bytes, a contiguous uint8 array."""

    def content(self) -> bytes:
        """Return the digest of all bytes taken; empty when nothing is verified."""


class FullHasher:
    """Every byte counts."""

    def __init__(self) -> None:
        self._hash = xxh3_128()

    def update(self, piece: Bytes) -> None:
        """See Hasher."""
        self._hash.update(piece.data)

    def content(self) -> bytes:
        """See Hasher."""
        return self._hash.digest()


class SampledHasher:
    """The blocks of ``sampled_ranges`` count: a fault elsewhere goes unseen."""

    def __init__(self, meta: TensorMeta, version: int) -> None:
        self._hash = xxh3_128()
        self._ranges = sampled_ranges(meta, version)
        self._next = next(self._ranges, None)
        self._position = 0

    def update(self, piece: Bytes) -> None:
        """See Hasher."""
        begin, end = self._position, self._position + piece.nbytes
        self._position = end
        while self._next is not None and self._next[0] < end:
            low, high = self._next
            self._hash.update(piece[max(low - begin, 0) : high - begin].data)
            if high > end:
                return
            self._next = next(self._ranges, None)

    def content(self) -> bytes:
        """See Hasher."""
        return self._hash.digest()


class NoHasher:
    """verify=off."""

    def update(self, piece: Bytes) -> None:
        """See Hasher."""

    def content(self) -> bytes:
        """See Hasher."""
        return b""


NO_HASHER = NoHasher()


def sampled_ranges(meta: TensorMeta, version: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges that verify=sampled reads, in order: the same on both sides, others at every version."""
    nbytes = meta.nbytes
    last = max(-(-nbytes // SAMPLE_BLOCK) - 1, 0)
    seed = int.from_bytes(xxh3_128_digest(f"{meta.name}\0{version}".encode())[:8], "little")
    for group in range(0, last + 1, SAMPLE_GROUP):
        # One draw a group, by a multiplicative hash of (seed, group).
        pick = group + (((seed ^ group) * 0x9E3779B97F4A7C15 >> 40) % SAMPLE_GROUP)
        chosen = {pick, 0} if group == 0 else {pick}
        if group + SAMPLE_GROUP > last:
            chosen.add(last)
        for block in sorted(b for b in chosen if b <= last):
            yield block * SAMPLE_BLOCK, min((block + 1) * SAMPLE_BLOCK, nbytes)


def sampled_place(place: int, version: int) -> bool:
    """Whether verify=sampled reads the tensor at ``place`` of a stream, where it reads whole tensors: one of each
    group, another at every version."""
    pick = int.from_bytes(xxh3_128_digest(f"{place // SAMPLE_GROUP}\0{version}".encode())[:8], "little") % SAMPLE_GROUP
    return place % SAMPLE_GROUP == pick


def hasher(meta: TensorMeta, verify: Verify, version: int) -> Hasher:
    """Return what hashes the bytes of one tensor of one sync."""
    if verify == "full":
        return FullHasher()
    return SampledHasher(meta, version) if verify == "sampled" else NO_HASHER


def bind(meta: TensorMeta, content: bytes, *, version: int, base_version: int | None = None) -> bytes:
    """Return the 16-byte digest of a tensor in a sync: its content's digest chained to what it is and belongs to.

    ``base_version`` is that of the weights that a delta is applied to, None for full tensors. Empty in, empty out.
    """
    if not content:
        return b""
    head = msgspec.msgpack.encode((meta.name, meta.dtype, meta.shape, version, base_version))
    return xxh3_128_digest(head + content)


def content_digest(data: Bytes) -> bytes:
    """Return the 16-byte digest of a contiguous uint8 array."""
    return xxh3_128_digest(data.data)


class SyncDigest:
    """The digest of a whole sync: over its tensors' digests in order of their names, whatever order they came in."""

    def __init__(self, version: int, base_version: int | None = None) -> None:
        self.tensors = 0
        self.nbytes = 0
        self._version = version
        self._base_version = base_version
        self._digests: dict[str, bytes] = {}

    def add(self, meta: TensorMeta, digest: bytes) -> None:
        """Count one tensor. Raises CorruptedError when it came before."""
        if meta.name in self._digests:
            raise CorruptedError(f"tensor {meta.name} arrived twice in one sync")
        self._digests[meta.name] = digest
        self.tensors += 1
        self.nbytes += meta.nbytes

    def add_unverified(self, names: dict[str, bytes], nbytes: int) -> None:
        """Count tensors that have no digests, together ``nbytes``. Raises CorruptedError when one came before."""
        if not names.keys().isdisjoint(self._digests):
            raise CorruptedError(f"tensor {min(names.keys() & self._digests.keys())} arrived twice in one sync")
        self._digests.update(names)
        self.tensors += len(names)
        self.nbytes += nbytes

    def digest(self) -> bytes:
        """Return 16 bytes over version, base version, names and digests."""
        head = (self._version, self._base_version)
        return xxh3_128_digest(msgspec.msgpack.encode((*head, sorted(self._digests.items()))))

    def summary(self, verify: Verify) -> SyncSummary:
        """Return what the last bucket of the sync carries."""
        return SyncSummary(self._version, self._base_version, self.tensors, self.nbytes, verify, self.digest())
