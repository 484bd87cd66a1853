"""A ring of buckets in shared memory: one process fills a slot while others drain the one before.

The bytes stay in the segment; who may touch which slot goes as short messages over unix sockets. They cost a few
microseconds a bucket, put a sleeping process to work without polling, order memory between the processes on every
architecture, and end a wait at once when the other side dies.
"""

from __future__ import annotations

import math
import mmap
import select
import struct
from collections.abc import Iterator

import msgspec
import torch

from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError, DeadlineError, GivenUpError, PeerLostError, TransferError
from rlctl.sync.shared_memory import Segment
from rlctl.sync.tensor_meta import BucketMeta, Size

# Two slots of this size stay in the last-level cache of a server CPU; smaller ones lose more to waking each other up.
SLOT_NBYTES = 8 << 20
_HEAD = struct.Struct("<BQ")  # kind of message, number of the bucket since the ring was made
_BUCKET, _ABORT = 1, 2
_ACK = struct.Struct("<Q")


class _Geometry(msgspec.Struct, frozen=True, array_like=True):
    slots: Size
    slot_nbytes: Size
    stride: Size
    published: Size


class RingProducer:
    """The side that fills. A consumer that dies, or does not keep up until the deadline, is dropped and named.

    Args:
        slot_nbytes: bytes of one slot: the size of a bucket.
        slots: how many; two let filling and draining overlap.

    Attributes:
        lost: peer -> why it was dropped.
    """

    def __init__(self, slot_nbytes: int = SLOT_NBYTES, slots: int = 2) -> None:
        self.slot_nbytes = slot_nbytes
        self.lost: dict[str, str] = {}
        stride = -(-slot_nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.segment = Segment.create(stride * slots, label="ring")
        self._slots = _slots(self.segment, slots, slot_nbytes, stride)
        self._stride = stride
        self._published = 0
        self._first = 0  # the number of the sync's first bucket
        self._acked: dict[Channel, int] = {}
        self._deadline = Deadline(math.inf)
        self._stall = math.inf

    @property
    def slots(self) -> list[torch.Tensor]:
        """The buckets' memory."""
        return list(self._slots)

    @property
    def peers(self) -> list[str]:
        """The consumers that are attached."""
        return [channel.peer for channel in self._acked]

    def attach(self, channel: Channel, deadline: Deadline) -> None:
        """Hand the segment to a consumer at the other end of a unix socket; it takes part from the next bucket on."""
        geometry = _Geometry(len(self._slots), self.slot_nbytes, self._stride, self._published)
        channel.send(msgspec.msgpack.encode(geometry), deadline)
        channel.send_fd(self.segment.fd, deadline)
        self._acked[channel] = self._published

    def begin(self, deadline: Deadline, *, stall: float = math.inf) -> None:
        """Start a sync: ``deadline`` for all of it, ``stall`` seconds for any one bucket."""
        self._first = self._published
        self._deadline = deadline
        self._stall = stall

    def acquire(self, index: int) -> torch.Tensor:
        """Return the slot of the sync's bucket ``index``, when no consumer reads it any more. It may be one that
        comes after the next, while earlier ones are still being filled.

        Raises PeerLostError when no consumer is left, DeadlineError when the sync's time is over.
        """
        self._deadline.check(f"bucket {index}")
        number = self._first + index
        self._wait(number + 1 - len(self._slots), f"bucket {index}")
        return self._slots[number % len(self._slots)]

    def publish(self, bucket: FilledBucket) -> None:
        """Tell every consumer that the next slot, the first not published yet, is filled."""
        self._tell(_HEAD.pack(_BUCKET, self._published) + bucket.meta.encode())
        self._published += 1

    def finish(self) -> None:
        """Wait until every consumer is through with everything. Raises PeerLostError when none is left."""
        self._wait(self._published, "the end of the sync")

    def abort(self, reason: str) -> None:
        """Tell every consumer that this sync will not end."""
        self._tell(_HEAD.pack(_ABORT, self._published) + reason.encode())

    def drop(self, peer: str, reason: str) -> None:
        """Part with a consumer."""
        for channel in [c for c in self._acked if c.peer == peer]:
            self._drop(channel, reason)

    def close(self) -> None:
        """Part with all consumers and give up the segment."""
        for channel in self._acked:
            channel.close()
        self._acked.clear()
        self._slots.clear()
        self.segment.close()

    def _tell(self, message: bytes) -> None:
        for channel in list(self._acked):
            try:
                channel.send(message, self._deadline.within(self._stall))
            except (PeerLostError, DeadlineError) as error:
                self._drop(channel, error.message)

    def _wait(self, count: int, what: str) -> None:
        deadline = self._deadline.within(self._stall)
        while behind := self._behind(count):
            ready = _readable(behind, deadline)
            for channel in ready:
                self._read_ack(channel, deadline)
            if not ready:
                for channel in behind:
                    self._drop(channel, f"{channel.peer} did not free a slot: {deadline.error(what).message}")
        if not self._acked:
            reasons = "; ".join(self.lost.values()) or "none was attached"
            raise PeerLostError(f"no receiver is left at {what}: {reasons}")

    def _read_ack(self, channel: Channel, deadline: Deadline) -> None:
        try:
            (self._acked[channel],) = _ACK.unpack(channel.receive(deadline, limit=_ACK.size))
        except TransferError as error:
            self._drop(channel, error.message)

    def _behind(self, count: int) -> list[Channel]:
        return [channel for channel, acked in self._acked.items() if acked < count]

    def _drop(self, channel: Channel, reason: str) -> None:
        del self._acked[channel]
        self.lost[channel.peer] = reason
        channel.close()


class RingConsumer:
    """The side that drains.

    Args:
        channel: a unix socket to the producer, which calls ``attach`` on its end.
        deadline: for the segment to arrive.
    """

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        self._channel = channel
        geometry = msgspec.msgpack.decode(channel.receive(deadline, limit=1024), type=_Geometry)
        self.segment = Segment.attach(channel.receive_fd(deadline), geometry.slots * geometry.stride)
        self._slots = _slots(self.segment, geometry.slots, geometry.slot_nbytes, geometry.stride)
        self._next = geometry.published

    def buckets(self, deadline: Deadline, *, stall: float = math.inf) -> Iterator[FilledBucket]:
        """Yield the buckets of one sync. Each one's bytes are valid until the next is asked for.

        Raises:
            DeadlineError: no bucket in ``stall`` seconds, or no end by ``deadline``.
            PeerLostError: the producer died.
            TransferError: the producer gave the sync up.
            CorruptedError: a message was lost or repeated.
        """
        last = False
        while not last:
            deadline.check(f"the sync from {self._channel.peer}")
            bucket = self._receive(deadline.within(stall))
            last = bucket.meta.summary is not None
            yield bucket
            self._next += 1
            self._channel.send(_ACK.pack(self._next), deadline.within(stall))

    @property
    def connected(self) -> bool:
        """Whether the producer is still there."""
        return not self._channel.ended()

    def close(self) -> None:
        """Leave the ring."""
        self._channel.close()
        self._slots.clear()
        self.segment.close()

    def _receive(self, deadline: Deadline) -> FilledBucket:
        message = memoryview(self._channel.receive(deadline))
        if len(message) < _HEAD.size:
            raise CorruptedError(f"a message of {len(message)} bytes from {self._channel.peer}")
        kind, number = _HEAD.unpack_from(message)
        body = message[_HEAD.size :]
        if kind == _ABORT:
            raise GivenUpError(f"{self._channel.peer} gave the sync up: {bytes(body).decode(errors='replace')}")
        if kind != _BUCKET or number != self._next:
            raise CorruptedError(f"message {number} from {self._channel.peer} where {self._next} was due")
        meta = BucketMeta.decode(body)
        slot = self._slots[number % len(self._slots)]
        if meta.used > slot.numel():
            raise CorruptedError(f"bucket {meta.index} of {meta.used} bytes in a slot of {slot.numel()}")
        return FilledBucket(meta, slot[: meta.used])


def _slots(segment: Segment, count: int, nbytes: int, stride: int) -> list[torch.Tensor]:
    return [segment.memory[i * stride : i * stride + nbytes] for i in range(count)]


def _readable(channels: list[Channel], deadline: Deadline) -> list[Channel]:
    poll = select.poll()
    found = {channel.fileno(): channel for channel in channels}
    for number in found:
        poll.register(number, select.POLLIN)
    return [found[number] for number, _ in poll.poll(deadline.milliseconds)]
