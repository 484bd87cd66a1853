"""Faults for drills: what a sync must survive, put into a member on purpose.

They strike in one transfer: at a bucket's boundary, on its way, or in the stream of tensors.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from rlctl.errors import UsageError
from rlctl.sync.bucket_engine import BucketEngine
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.digest import Bytes
from rlctl.sync.engine import CheckpointEngine, Stream
from rlctl.sync.tensor_meta import BucketMeta
from rlctl.sync.work import Done, Work

Kind = Literal[
    "kill",
    "stall",
    "flip",
    "swap",
    "drop",
    "repeat",
    "stale_base",
    "wrong_version",
    "unknown_name",
    "missing_name",
    "raise",
]
IN_STREAM: tuple[Kind, ...] = ("unknown_name", "missing_name", "raise")
IN_CALL: tuple[Kind, ...] = ("stale_base", "wrong_version")
SENDER: tuple[Kind, ...] = ("kill", "stall", "flip", "swap", "drop", "repeat", *IN_CALL, *IN_STREAM)
RECEIVER: tuple[Kind, ...] = ("kill", "stall")


class Fault(msgspec.Struct, frozen=True):
    """One fault.

    Attributes:
        kind: what happens.
        at: bucket (or, in the stream, tensor) that it happens at.
        seconds: how long a stall is.
    """

    kind: Kind
    at: int = 0
    seconds: float = 0.0


@runtime_checkable
class PieceMover(Protocol):
    """An engine that moves no buckets, but pieces of tensors through files."""

    def _put_piece(self, fd: int, piece: Bytes) -> None: ...

    def _take_piece(self) -> None: ...


class Drill:
    """Puts one fault into one member's next transfer."""

    def __init__(self, engine: CheckpointEngine, fault: Fault) -> None:
        self._engine = engine
        self._fault = fault
        self._struck = False
        self._takes = itertools.count()

    def arm(self) -> None:
        """Put it in. Raises UsageError when the engine has no buckets for it to strike."""
        if self._fault.kind in IN_STREAM or self._fault.kind in IN_CALL:
            return
        methods: dict[str, Callable[..., object]]
        if isinstance(self._engine, BucketEngine):
            methods = {"_put": self._sent} if self._engine.member.role == "trainer" else {"_take": self._taken}
        elif isinstance(self._engine, PieceMover):
            methods = {"_put_piece": self._written, "_take_piece": self._read}
        else:
            raise UsageError(f"backend {self._engine.name} moves nothing that can be struck")
        for name, method in methods.items():
            setattr(self._engine, name, partial(method, getattr(self._engine, name)))

    def disarm(self) -> None:
        """Take it out."""
        for method in ("_put", "_take", "_put_piece", "_take_piece"):
            vars(self._engine).pop(method, None)

    def stream(self, tensors: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the stream with the fault in it."""
        for place, (name, tensor) in enumerate(tensors):
            if place != self._fault.at or self._fault.kind not in IN_STREAM:
                yield name, tensor
            elif self._fault.kind == "unknown_name":
                yield f"{name}.of_another_model", tensor
            elif self._fault.kind == "raise":
                raise RuntimeError(f"the gather of {name} failed")

    def arguments(self, version: int, base_version: int | None) -> tuple[int, int | None]:
        """Return the version and base version that the sender says."""
        if self._fault.kind == "wrong_version":
            return version + 1, base_version
        if self._fault.kind == "stale_base":
            return version, version - 2 if base_version is None else base_version - 1
        return version, base_version

    def _sent(self, put: Callable[[FilledBucket], Work[None]], bucket: FilledBucket) -> Work[None]:
        last = bucket.meta.summary is not None
        if self._struck or (bucket.meta.index != self._fault.at and not last):
            return put(bucket)
        self._struck = True
        self._strike()
        if self._fault.kind == "drop":
            return Done(None)
        works = [put(b) for b in _damaged(self._fault.kind, bucket)]
        for work in works[:-1]:
            work.wait(self._engine.deadline)
        return works[-1]

    def _taken(
        self, take: Callable[[int, torch.Tensor], Work[BucketMeta]], sender: int, buffer: torch.Tensor
    ) -> Work[BucketMeta]:
        work = take(sender, buffer)
        if not self._struck and next(self._takes) == self._fault.at:
            self._struck = True
            self._strike()
        return work

    def _written(self, put: Callable[[int, Bytes], None], fd: int, piece: Bytes) -> None:
        if self._struck or next(self._takes) != self._fault.at:
            put(fd, piece)
            return
        self._struck = True
        self._strike()
        for damaged in _damaged_piece(self._fault.kind, piece):
            put(fd, damaged)

    def _read(self, take: Callable[[], None]) -> None:
        if not self._struck and next(self._takes) == self._fault.at:
            self._struck = True
            self._strike()
        take()

    def _strike(self) -> None:
        if self._fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault.kind == "stall":
            time.sleep(self._fault.seconds)


def _damaged(kind: Kind, bucket: FilledBucket) -> Iterable[FilledBucket]:
    """Return what travels in a bucket's place."""
    number, chunk = max(enumerate(bucket.meta.chunks), key=lambda c: c[1].nbytes, default=(0, None))
    if chunk is not None and chunk.nbytes >= 16:
        content = bucket.data[chunk.offset : chunk.offset + chunk.nbytes]
        if number in bucket.placed:  # these are the trainer's weights
            content = bucket.placed[number].clone()
            bucket = bucket._replace(placed={**bucket.placed, number: content})
        if kind == "flip":
            content[chunk.nbytes // 2] ^= 16
        if kind == "swap":
            words = content[:16].view(2, 8)
            words[[0, 1]] = words[[1, 0]]
    return [bucket, bucket] if kind == "repeat" else [bucket]


def _damaged_piece(kind: Kind, piece: Bytes) -> Iterable[Bytes]:
    """Return what is written in a piece's place."""
    content: Bytes = np.array(piece)
    if kind == "flip":
        content[len(content) // 2] ^= 16
    if kind == "swap":
        content = content[::-1].copy()
    return {"drop": [], "repeat": [content, content]}.get(kind, [content])
