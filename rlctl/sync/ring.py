"""A ring of buckets in shared memory: one process fills a slot while others drain the ones before."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import torch

from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError, GivenUpError
from rlctl.sync.fanout import Fanout, acknowledge
from rlctl.sync.ring_memory import RingMemory, host_slots, receive_slots
from rlctl.sync.tensor_meta import BucketMeta

# Two slots of this size stay in a last-level cache of 32 MiB, also beside other processes. Smaller ones cost more in
# messages than they gain: after each copy of some megabytes, code and small objects must come into the cache again.
SLOT_NBYTES = 6 << 20
SLOTS = 2
_HEAD = struct.Struct("<BIQ")  # kind of message, slot, number of the bucket since the ring was made
_BUCKET, _ABORT = 1, 2


class RingProducer(Fanout):
    """The side that fills. See Fanout for what happens to a consumer that does not keep up.

    Args:
        slot_nbytes: bytes of one slot: the size of a bucket.
        slots: how many; two let filling and draining overlap.
        memory: where the slots are; default: memory of this node that is in no process's own.
    """

    def __init__(self, slot_nbytes: int = SLOT_NBYTES, slots: int = SLOTS, *, memory: RingMemory | None = None) -> None:
        super().__init__()
        self.slot_nbytes = slot_nbytes
        self.memory = memory or host_slots(slots, slot_nbytes)
        self._published = 0
        self._places = {slot.data_ptr(): place for place, slot in enumerate(self.memory.slots)}
        self._due = [0] * len(self.memory.slots)  # how many buckets must be done with before a slot is free

    @property
    def told(self) -> int:
        """Buckets published so far, over all syncs."""
        return self._published

    @property
    def slots(self) -> list[torch.Tensor]:
        """The buckets' memory."""
        return list(self.memory.slots)

    def attach(self, channel: Channel, deadline: Deadline) -> None:
        """Hand the memory to a consumer at the other end of a unix socket; it takes part from the next bucket on."""
        self.memory.hand_over(channel, deadline)
        acknowledge(channel, self._published, deadline)
        self._acked[channel] = self._published

    def begin(self, deadline: Deadline, *, stall: float = math.inf) -> None:
        """Start a sync: ``deadline`` for all of it, ``stall`` seconds for any one bucket."""
        self._begin(deadline, stall)

    def acquire(self, index: int) -> torch.Tensor:
        """Return slot ``index``, counted around the ring, when no consumer reads it any more. Several may be filled
        at the same time, and published in any order.

        Raises PeerLostError when no consumer is left, DeadlineError when the sync's time is over.
        """
        self._deadline.check(f"bucket {index}")
        slots = self.memory.slots
        self._wait(self._due[index % len(slots)], f"bucket {index}")
        return slots[index % len(slots)]

    def publish(self, bucket: FilledBucket) -> None:
        """Tell every consumer that a bucket is in the slot that ``acquire`` gave; an empty one is in none."""
        self.memory.settle()
        place = self._places[bucket.data.data_ptr()] if bucket.meta.used else 0
        self._tell(_HEAD.pack(_BUCKET, place, self._published) + bucket.meta.encode())
        self._published += 1
        if bucket.meta.used:
            self._due[place] = self._published

    def finish(self) -> None:
        """Wait until every consumer is through with everything. Raises PeerLostError when none is left."""
        self._wait(self._published, "the end of the sync")

    def abort(self, reason: str) -> None:
        """Tell every consumer that this sync will not end."""
        self._tell(_HEAD.pack(_ABORT, 0, self._published) + reason.encode())

    def close(self) -> None:
        """Part with all consumers and give up the memory."""
        super().close()
        self.memory.close()


class RingConsumer:
    """The side that drains.

    Args:
        channel: a unix socket to the producer, which calls ``attach`` on its end.
        deadline: for the memory to arrive.
    """

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        self.channel = channel
        self.memory = receive_slots(channel, deadline)
        self.begin(int.from_bytes(channel.receive(deadline, limit=8), "little"))

    def begin(self, told: int) -> None:
        """Expect the bucket after the first ``told`` ones of the producer; not needed unless some may have gone
        astray."""
        self._next, self._owed = told, 0

    def buckets(self, deadline: Deadline, *, stall: float = math.inf) -> Iterator[FilledBucket]:
        """Yield the buckets of one sync. Each one's bytes are valid until the next is asked for.

        Raises:
            DeadlineError: no bucket in ``stall`` seconds, or no end by ``deadline``.
            PeerLostError: the producer died.
            GivenUpError: the producer gave the sync up.
            CorruptedError: a message was lost or repeated.
        """
        last = False
        while not last:
            deadline.check(f"the sync from {self.channel.peer}")
            bucket = self.take(deadline if math.isinf(stall) else deadline.within(stall))
            last = bucket.meta.summary is not None
            yield bucket
            self.free(deadline if math.isinf(stall) else deadline.within(stall), last=last)

    def take(self, deadline: Deadline) -> FilledBucket:
        """Return the next bucket, once it has come. See ``buckets``."""
        message = memoryview(self.channel.receive(deadline))
        if len(message) < _HEAD.size:
            raise CorruptedError(f"a message of {len(message)} bytes from {self.channel.peer}")
        kind, place, number = _HEAD.unpack_from(message)
        body = message[_HEAD.size :]
        if kind == _ABORT:
            raise GivenUpError(f"{self.channel.peer} gave the sync up: {bytes(body).decode(errors='replace')}")
        if kind != _BUCKET or number != self._next:
            raise CorruptedError(f"message {number} from {self.channel.peer} where {self._next} was due")
        meta, slots = BucketMeta.decode(body), self.memory.slots
        if place >= len(slots) or meta.used > slots[place].numel():
            raise CorruptedError(f"bucket {meta.index} of {meta.used} bytes is not in slot {place} of {len(slots)}")
        slot = slots[place]
        return FilledBucket(meta, slot if meta.used == slot.numel() else slot[: meta.used])

    def free(self, deadline: Deadline, *, last: bool) -> None:
        """Give the slot of the bucket taken back. While more are here, half of the slots go back in one message."""
        self._next += 1
        self._owed += 1
        if last or not self.channel.pending or self._owed * 2 >= len(self.memory.slots):
            self.memory.settle()
            acknowledge(self.channel, self._next, deadline)
            self._owed = 0

    @property
    def connected(self) -> bool:
        """Whether the producer is still there."""
        return not self.channel.ended()

    def close(self) -> None:
        """Leave the ring."""
        self.channel.close()
        self.memory.close()
