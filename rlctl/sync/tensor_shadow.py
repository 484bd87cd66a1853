"""A shadow in which every tensor lies in one piece, so that deltas can be applied to it.

Once it was committed, it is the base of the next sync. What the inference process takes from it are whole tensors,
however they travelled: an engine with a loader of its own needs no more. It costs one model of memory, as any shadow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from rlctl.sync.buckets import FilledBucket, copy_bytes, hash_bytes
from rlctl.sync.cutting import aligned
from rlctl.sync.delta import MARK, apply_checked
from rlctl.sync.digest import SyncDigest, Verify, bind, hasher
from rlctl.sync.errors import CorruptedError, WrongBaseError
from rlctl.sync.shadow import Shadow
from rlctl.sync.tensor_meta import BucketMeta, Chunk, TensorMeta


class _Place(NamedTuple):
    """Where a tensor lies."""

    meta: TensorMeta
    segment: int
    offset: int


class TensorShadow(Shadow):
    """The worker's side.

    Attributes:
        version: of the content, once it was committed; None while it is a mix, or nothing.
    """

    def __init__(self, segment_nbytes: int) -> None:
        super().__init__(segment_nbytes)
        self.version: int | None = None
        self._places: dict[str, _Place] = {}
        self._used: list[int] = []  # bytes in use, by segment

    def take(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        version: int,
        base_version: int | None,
        verify: Verify,
    ) -> tuple[list[TensorMeta], bytes]:
        """Take a stream of ``DeltaEncoder``; ``buckets`` are then the whole tensors of ``version``, each with its
        digest. Returns what they are, and the digest of all of them.

        Raises:
            WrongBaseError: deltas against another version than this is.
            CorruptedError: a delta that does not lead to what was sent.
        """
        if base_version is not None and base_version != self.version:
            raise WrongBaseError(f"changes against version {base_version} were to come, and {self.version} is staged")
        self.version, self.buckets = None, []
        total = SyncDigest(version)
        chunks: dict[str, Chunk] = {}
        for sent, tensor in tensors:
            name = sent.removesuffix(MARK)
            if sent == name:
                place = self._place(TensorMeta.of(name, tensor))
                hashing = hasher(place.meta, verify, version)
                copy_bytes(self._bytes(place), tensor.contiguous().reshape(-1).view(torch.uint8), hashing)
                content = hashing.content()
            elif name in self._places:
                place = self._places[name]
                data = self._bytes(place)
                full = verify == "full"
                content = apply_checked(tensor.cpu().numpy(), place.meta, data.numpy(), check_bytes=full)
                if not full:
                    hashing = hasher(place.meta, verify, version)
                    hash_bytes(data, hashing)
                    content = hashing.content()
            else:
                raise CorruptedError(f"a delta of {name} arrived, of which nothing is here")
            digest = bind(place.meta, content, version=version)
            total.add(place.meta, digest)
            chunks[name] = Chunk(place.meta, 0, place.meta.nbytes, place.offset, digest)
        self._close(chunks, version, total, verify)
        return [chunk.tensor for chunk in chunks.values()], total.digest()

    def _bytes(self, place: _Place) -> torch.Tensor:
        return self._segments[place.segment].memory[place.offset : place.offset + place.meta.nbytes]

    def _place(self, meta: TensorMeta) -> _Place:
        """Return the tensor's place: where it was, or the first with room."""
        place = self._places.get(meta.name)
        if place is not None and place.meta == meta:
            return place
        for segment, used in enumerate(self._used):
            if used + meta.nbytes <= self._segments[segment].nbytes:
                break
        else:
            segment = len(self._used)
            self._add(max(self._bucket_nbytes, meta.nbytes))
            self._used.append(0)
        place = self._places[meta.name] = _Place(meta, segment, self._used[segment])
        self._used[segment] = aligned(place.offset + meta.nbytes)
        return place

    def _close(self, chunks: dict[str, Chunk], version: int, total: SyncDigest, verify: Verify) -> None:
        """Describe what lies here, a bucket for each segment."""
        by_segment: list[list[Chunk]] = [[] for _ in self._used] or [[]]
        for name, chunk in chunks.items():
            by_segment[self._places[name].segment].append(chunk)
        for index, mine in enumerate(by_segment):
            used = max((chunk.offset + chunk.nbytes for chunk in mine), default=0)
            summary = total.summary(verify) if index == len(by_segment) - 1 else None
            memory = self.acquire(index)[:used]
            self.buckets.append(FilledBucket(BucketMeta(index, version, used, tuple(mine), summary), memory))
