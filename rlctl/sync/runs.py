"""A bucket as the stretches of bytes that travel apart: large pieces each by itself, small ones together.

A large piece need not lie in the bucket: it can be read where the trainer's weights are and written where the
engine's are. Both sides know the stretches from the bucket's description.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from rlctl.sync.buckets import FilledBucket
from rlctl.sync.tensor_meta import BucketMeta

# A message of its own costs less than the copies of a piece of this size.
APART_NBYTES = 128 << 10
# Small runs between large ones are copied together into one message, up to this size.
TOGETHER_NBYTES = 1 << 20
# What is small beside its bucket can come with the message that announces it, up to this many bytes.
_ALONG_NBYTES, _ALONG_SHARE = 64 << 10, 64


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


def along(found: Iterable[Run], bucket: FilledBucket) -> list[Run]:
    """Return the runs that go with the message that announces the bucket: all small ones, or none."""
    small = [run for run in found if run.chunk is None]
    nbytes = sum(run.end - run.start for run in small)
    fits = nbytes <= min(_ALONG_NBYTES, bucket.meta.used // _ALONG_SHARE)
    return small if fits and bucket.data.device.type == "cpu" else []


def messages(meta: BucketMeta) -> list[list[Run]]:
    """Return the runs of a bucket by the messages that they go in: all small ones in one, if that is little."""
    found = list(runs(meta))
    small = [run for run in found if run.chunk is None]
    if len(small) < 2 or sum(run.end - run.start for run in small) > TOGETHER_NBYTES:
        return [[run] for run in found]
    return [small, *([run] for run in found if run.chunk is not None)]


def message_of(message: list[Run], data: torch.Tensor, placed: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return what to send."""
    parts = [memory_of(run, data, placed) for run in message]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def room_for(message: list[Run], data: torch.Tensor, placed: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return where to receive it; what goes into several runs is to be ``spread`` then."""
    if len(message) == 1:
        return memory_of(message[0], data, placed)
    return data.new_empty(sum(run.end - run.start for run in message))


def spread(message: list[Run], received: torch.Tensor, data: torch.Tensor) -> None:
    """Bring what was received in one message where its runs belong."""
    if len(message) > 1:
        for run, part in zip(message, received.split([run.end - run.start for run in message]), strict=True):
            data[run.start : run.end] = part


def memory_of(run: Run, data: torch.Tensor, placed: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return where a run's bytes are: in the bucket's ``data``, or where its chunk is ``placed``."""
    if run.chunk is not None and run.chunk in placed:
        return placed[run.chunk]
    return data[run.start : run.end]
