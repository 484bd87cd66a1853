"""What is done with a bucket whose digests nobody looks at: worked out once, and again when something has changed.

Between copies of megabytes neither code nor data are in the cache, so that each object that is touched costs several
times what it costs in a loop; here a bucket of unchanged tensors touches few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rlctl.sync.buckets import FilledBucket
from rlctl.sync.digest import Bytes
from rlctl.sync.targets import Content, Target
from rlctl.sync.tensor_meta import Chunk


class Routine(NamedTuple):
    """See the module.

    Attributes:
        copies: (to, from).
        names: the tensors that are whole in the bucket, without digests; ``nbytes`` of all of them.
        pieces: the chunks of others.
        loaded, unknown: names of the tensors that end in the bucket, with a target and without.
    """

    copies: list[tuple[Bytes, Bytes]]
    names: dict[str, bytes]
    nbytes: int
    pieces: list[Chunk]
    loaded: list[str]
    unknown: list[str]

    @classmethod
    def of(cls, bucket: FilledBucket, held: Mapping[str, Target]) -> Routine | None:
        """Work it out; None when there are digests, repeated names, or a tensor that a plain copy does not bring to
        its target."""
        content = Content(bucket)
        found = cls([], {}, 0, [], [], [])
        nbytes = 0
        for number, chunk in enumerate(bucket.meta.chunks):
            name = chunk.tensor.name
            if chunk.digest or name in found.names:
                return None
            target = held.get(name)
            pair = content.pair(number, chunk, target)
            if target is not None and pair is None:
                return None
            if (
                pair is not None
                and target is not None
                and target.address + chunk.start != content.address(number, chunk)
            ):
                found.copies.append(pair)
            if chunk.whole:
                found.names[name] = b""
                nbytes += chunk.nbytes
            else:
                found.pieces.append(chunk)
            if chunk.ends:
                (found.unknown if target is None else found.loaded).append(name)
        return found._replace(nbytes=nbytes)


class Routines:
    """Those of the buckets that came twice alike, to the same targets and in the same memory. A bucket that comes once,
    as of tensors that were gathered for it, is not kept: that would keep its memory."""

    def __init__(self) -> None:
        self._held: Mapping[str, Target] = {}
        self._seen: dict[tuple[str, int], _Seen] = {}

    def of(self, bucket: FilledBucket, held: Mapping[str, Target]) -> Routine | None:
        """Return what is to be done with a bucket, if it was worked out."""
        if held is not self._held:
            self._held, self._seen = held, {}
        key = bucket.meta.key
        seen = self._seen.get(key)
        if seen is None or not seen.fits(bucket):
            self._seen[key] = _Seen(bucket.meta.chunks, bucket.data.data_ptr(), bucket.placed)
            return None
        if not seen.again:
            seen.routine, seen.again = Routine.of(bucket, held), True
        return seen.routine

    def forget(self) -> None:
        """Let everything go."""
        self._seen = {}


@dataclass
class _Seen:
    """A bucket, without its memory."""

    chunks: tuple[Chunk, ...]
    address: int
    placed: Mapping[int, torch.Tensor]
    again: bool = False
    routine: Routine | None = None

    def fits(self, bucket: FilledBucket) -> bool:
        """Whether it is this one."""
        return (
            self.chunks is bucket.meta.chunks
            and self.placed is bucket.placed
            and self.address == bucket.data.data_ptr()
        )
