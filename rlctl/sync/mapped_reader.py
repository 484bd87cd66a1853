"""The receiver of weights that lie in the sender's arena: it copies them out, or uses them there. See ``mapped``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rlctl.sync.arena import HEAD, write_count
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError
from rlctl.sync.mapped_messages import Extent, Released, Table, Through, encode, told
from rlctl.sync.shared_memory import Segment
from rlctl.sync.tensor_meta import BucketMeta, Chunk, check_chunk


class Reading(NamedTuple):
    """A segment that is read: its counter of writes, and what it says as long as the bytes are those of the sync."""

    counter: npt.NDArray[np.int64]
    writes: int


@dataclass(frozen=True)
class Kept:
    """What a sync brought, used where it lies.

    Attributes:
        consumer: that it came by.
        number: of the sync, at its sender.
        readings: of its memory.
    """

    consumer: MappedConsumer
    number: int
    readings: list[Reading]

    def check(self) -> None:
        """Raise CorruptedError when the sender has written there since."""
        self.consumer.check_unwritten(self.readings)

    def release(self, deadline: Deadline) -> None:
        """Say that it is not used any more."""
        self.consumer.release(self.number, deadline)


class MappedConsumer:
    """The receiver's side.

    Args:
        channel: a unix socket to the sender, which calls ``attach`` on its end.
        deadline: not needed; the sender has nothing to say yet.
    """

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        self.channel = channel
        self._segments: dict[int, Segment] = {}
        self._table: list[Chunk] = []
        self._read: dict[int, Reading] = {}
        self._syncs = 0

    def begin(self, told: int) -> None:
        """Expect the sync after the first ``told`` ones of the sender."""
        self._syncs, self._read = told, {}

    def take(self, deadline: Deadline) -> FilledBucket:
        """Return the next extent, once it is told. Its bytes stay as they are until the last ``free``.

        Raises:
            DeadlineError: none by the deadline.
            PeerLostError: the sender died.
            CorruptedError: what it says makes no sense.
        """
        while True:
            said = told(self.channel.receive(deadline), self.channel.peer)
            if isinstance(said, Extent):
                return self._extent(said)
            if isinstance(said, Table):
                if said.first > len(self._table):
                    raise CorruptedError(f"entry {said.first} of a table came, and {len(self._table)} are known")
                del self._table[said.first :]
                chunks = [Chunk(e.tensor, 0, e.tensor.nbytes, e.offset) for e in said.entries]
                for chunk in chunks:
                    check_chunk(chunk, chunk.offset + chunk.nbytes)
                self._table += chunks
                continue
            for serial in said.gone:
                self._segments.pop(serial).close()
            self._segments[said.serial] = Segment.attach(self.channel.receive_fd(deadline), said.nbytes)

    def free(self, deadline: Deadline, *, last: bool) -> None:
        """Say, after the ``last`` extent, that all of it was read.

        Raises CorruptedError when it was overwritten meanwhile: the sender did not wait for this receiver any more.
        """
        if last:
            self._end(deadline, keeps=False)

    def keep(self, deadline: Deadline) -> Kept:
        """Say, after the last extent, that all of it is used where it lies until ``Kept.release``. Raises as ``free``
        does."""
        return self._end(deadline, keeps=True)

    def _end(self, deadline: Deadline, *, keeps: bool) -> Kept:
        kept = Kept(self, self._syncs + 1, list(self._read.values()))
        kept.check()
        self._syncs += 1
        self.channel.send(encode(Through(self._syncs, keeps)), deadline)
        self._read = {}
        return kept

    def check_unwritten(self, readings: Iterable[Reading]) -> None:
        """Raise CorruptedError when memory that was read has been written since."""
        if any(reading.counter[0] != reading.writes for reading in readings):
            raise CorruptedError(f"{self.channel.peer} changed its weights while they were read here")

    def release(self, number: int, deadline: Deadline) -> None:
        """Say that the memory of sync ``number`` is not used any more."""
        self.channel.send(encode(Released(number)), deadline)

    def close(self) -> None:
        """Leave; tensors that are still used keep their memory."""
        self.channel.close()
        for segment in self._segments.values():
            segment.close()
        self._segments = {}

    def _extent(self, said: Extent) -> FilledBucket:
        chunks = self._table[said.first : said.first + said.count]
        if len(chunks) != said.count or (said.digests and len(said.digests) != said.count):
            raise CorruptedError(f"{said.count} entries from {said.first} on of a table of {len(self._table)}")
        if said.digests:
            chunks = [Chunk(c.tensor, 0, c.nbytes, c.offset, d) for c, d in zip(chunks, said.digests, strict=True)]
        meta = BucketMeta(said.index, said.version, said.used, tuple(chunks), said.summary)
        if any(chunk.offset + chunk.nbytes > said.used for chunk in chunks):
            raise CorruptedError(f"a tensor lies outside extent {said.index} of {said.used} bytes")
        if not said.used:
            return FilledBucket(meta, torch.empty(0, dtype=torch.uint8))
        segment = self._segments.get(said.serial)
        if segment is None or HEAD + said.start + said.used > segment.nbytes:
            raise CorruptedError(
                f"bytes {said.start} to {said.start + said.used} of segment {said.serial} are not here"
            )
        self._read.setdefault(said.serial, Reading(write_count(segment), said.writes))
        if self._read[said.serial].writes != said.writes:
            raise CorruptedError(f"{self.channel.peer} changed its weights in the middle of a sync")
        begin = HEAD + said.start
        return FilledBucket(meta, segment.memory[begin : begin + said.used])
