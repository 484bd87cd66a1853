"""What is done with a bucket whose digests nobody looks at: worked out once, and again when something has changed.

Between copies of megabytes neither code nor data are in the cache, so that each object that is touched costs several
times what it costs in a loop; here a bucket of unchanged tensors touches few.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from rlctl.sync.buckets import FilledBucket
from rlctl.sync.digest import Bytes
from rlctl.sync.targets import Content, Target
from rlctl.sync.tensor_meta import Chunk


class Routine(NamedTuple):
    """See the module.

    Attributes:
        chunks, address, placed, held: what it was worked out for: the bucket's, and where all tensors go.
        copies: (to, from).
        names: the tensors that are whole in the bucket, without digests; ``nbytes`` of all of them.
        pieces: the chunks of others.
        loaded, unknown: names of the tensors that end in the bucket, with a target and without.
    """

    chunks: tuple[Chunk, ...]
    address: int
    placed: Mapping[int, torch.Tensor]
    held: Mapping[str, Target]
    copies: list[tuple[Bytes, Bytes]]
    names: dict[str, bytes]
    nbytes: int
    pieces: list[Chunk]
    loaded: list[str]
    unknown: list[str]

    def fits(self, bucket: FilledBucket, held: Mapping[str, Target]) -> bool:
        """Whether it is for this bucket."""
        return (
            self.chunks is bucket.meta.chunks
            and self.held is held
            and self.placed is bucket.placed
            and self.address == bucket.data.data_ptr()
        )

    @classmethod
    def of(cls, bucket: FilledBucket, held: Mapping[str, Target]) -> Routine | None:
        """Work it out; None when there are digests, repeated names, or a tensor that a plain copy does not bring to
        its target."""
        chunks, content = bucket.meta.chunks, Content(bucket)
        address = bucket.data.data_ptr()
        found = cls(chunks, address, bucket.placed, held, [], {}, 0, [], [], [])
        nbytes = 0
        for number, chunk in enumerate(chunks):
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
