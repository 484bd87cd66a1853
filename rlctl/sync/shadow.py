"""A sync that waits for its commit: its buckets in shared memory, at the worker, to be read by the inference process.

Segments are made when a sync first needs them and are used again. A reader maps each of them once.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import msgspec
import torch

from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError
from rlctl.sync.shared_memory import Segment
from rlctl.sync.tensor_meta import BucketMeta, Size


class _Contents(msgspec.Struct, frozen=True, array_like=True):
    shadow: str
    first: Size  # segment whose file comes with this message, as do those after it
    sizes: list[Size]  # of these segments
    metas: list[bytes]  # one for each segment in use


class Shadow:
    """The worker's side.

    Args:
        bucket_nbytes: bytes of one bucket, and of one segment.
    """

    def __init__(self, bucket_nbytes: int) -> None:
        self.id = uuid.uuid4().hex
        self._bucket_nbytes = bucket_nbytes
        self._segments: list[Segment] = []
        self.buckets: list[FilledBucket] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(segment.nbytes for segment in self._segments)

    def acquire(self, index: int) -> torch.Tensor:
        """Return the memory of bucket ``index``."""
        while index >= len(self._segments):
            self._add(self._bucket_nbytes)
        return self._segments[index].memory

    def _add(self, nbytes: int) -> None:
        self._segments.append(Segment.create(nbytes, label="shadow"))

    def hand_over(self, channel: Channel, shadow: str, known: int, deadline: Deadline) -> None:
        """Let the reader at the other end read ``buckets``; return when it is through. It has mapped ``known``
        segments of the shadow that calls itself ``shadow``."""
        metas = [bucket.meta.encode() for bucket in self.buckets]
        first = known if shadow == self.id else 0
        fresh = self._segments[first : len(metas)]
        sizes = [segment.nbytes for segment in fresh]
        channel.send(msgspec.msgpack.encode(_Contents(self.id, first, sizes, metas)), deadline)
        for segment in fresh:
            channel.send_fd(segment.fd, deadline)
        channel.receive(deadline)

    def close(self) -> None:
        """Give the memory back."""
        self.buckets = []
        for segment in self._segments:
            segment.close()
        self._segments = []


class ShadowReader:
    """The inference process's side.

    Attributes:
        shadow: the id of the shadow that the mapped segments belong to.
    """

    def __init__(self) -> None:
        self.shadow = ""
        self._segments: list[Segment] = []

    @property
    def known(self) -> int:
        """Segments that are mapped."""
        return len(self._segments)

    def buckets(self, channel: Channel, deadline: Deadline) -> Iterator[FilledBucket]:
        """Yield the buckets that the worker hands over; they lie where they were received."""
        contents = msgspec.msgpack.decode(channel.receive(deadline), type=_Contents)
        if contents.shadow != self.shadow:
            self.close()
            self.shadow = contents.shadow
        if contents.first > len(self._segments):
            raise CorruptedError(f"segment {contents.first} of a shadow came, and {len(self._segments)} are mapped")
        for nbytes in contents.sizes:
            self._segments.append(Segment.attach(channel.receive_fd(deadline), nbytes))
        for segment, encoded in zip(self._segments, contents.metas, strict=False):
            meta = BucketMeta.decode(encoded)
            if meta.used > segment.nbytes:
                raise CorruptedError(f"bucket {meta.index} of {meta.used} bytes in a segment of {segment.nbytes}")
            yield FilledBucket(meta, segment.memory[: meta.used])
        channel.send(b"through", deadline)

    def close(self) -> None:
        """Unmap everything."""
        for segment in self._segments:
            segment.close()
        self._segments = []
