"""A bucket as the stretches of bytes that travel apart: large pieces each by itself, small ones together.

A large piece need not lie in the bucket: it can be read where the trainer's weights are and written where the
engine's are. Both sides know the stretches from the bucket's description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from rlctl.sync.tensor_meta import BucketMeta

# A message of its own costs less than the copies of a piece of this size.
APART_NBYTES = 128 << 10


class Run(NamedTuple):
    """Bytes ``[start, end)`` of a bucket; ``chunk``: the number of the only one in it, when that may lie elsewhere."""

    start: int
    end: int
    chunk: int | None


def runs(meta: BucketMeta) -> Iterator[Run]:
    """Yield the runs of a bucket, in order; gaps of alignment are in none, or inside one."""
    start = end = 0
    for number, chunk in enumerate(meta.chunks):
        if chunk.nbytes >= APART_NBYTES:
            if end > start:
                yield Run(start, end, None)
            yield Run(chunk.offset, chunk.offset + chunk.nbytes, number)
            start = end = chunk.offset + chunk.nbytes
        elif chunk.nbytes:
            start = chunk.offset if start == end else start
            end = chunk.offset + chunk.nbytes
    if end > start:
        yield Run(start, end, None)


def memory_of(run: Run, data: torch.Tensor, placed: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return where a run's bytes are: in the bucket's ``data``, or where its chunk is ``placed``."""
    if run.chunk is not None and run.chunk in placed:
        return placed[run.chunk]
    return data[run.start : run.end]
