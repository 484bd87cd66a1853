"""A rollout worker's connection to one sender of ``ipc``."""

from __future__ import annotations

import msgspec

from rlctl.errors import UsageError
from rlctl.sync.backends.ipc_sender import DIRECT, MAPPED, RING, Start
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Channel, connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.direct import DirectConsumer
from rlctl.sync.errors import CorruptedError
from rlctl.sync.mapped_reader import Kept, MappedConsumer
from rlctl.sync.ring import RingConsumer
from rlctl.sync.tensor_meta import BucketMeta

Consumer = RingConsumer | MappedConsumer | DirectConsumer
_WAYS: dict[str, type[Consumer]] = {RING: RingConsumer, MAPPED: MappedConsumer, DIRECT: DirectConsumer}


class Link:
    """See the module.

    Args:
        channel: to the sender.

    Attributes:
        bucket: what was taken last.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._consumers: dict[str, Consumer] = {}
        self._consumer: Consumer | None = None
        self._sync = ""
        self.bucket: FilledBucket | None = None

    @classmethod
    def connect(cls, address: str, receiver: str, token: str, sender: str, deadline: Deadline) -> Link:
        """Connect the engine with id ``receiver`` to what ``sender`` listens to."""
        channel = connect(address, token.encode(), sender, deadline)
        channel.send(receiver.encode(), deadline)
        return cls(channel)

    @property
    def consumer(self) -> Consumer:
        """What takes this sync's buckets."""
        assert self._consumer is not None
        return self._consumer

    def expect(self, sync: str) -> None:
        """Expect a sync by its name; what is left of an earlier one is passed over."""
        self._sync = sync
        self._consumer = self.bucket = None

    def take(self, deadline: Deadline) -> BucketMeta:
        """Take the next bucket; return what is in it."""
        if self._consumer is None:
            self._consumer = self._started(deadline)
        self.bucket = self.consumer.take(deadline)
        return self.bucket.meta

    def free(self, deadline: Deadline) -> None:
        """Let the memory of the bucket that was taken go."""
        assert self.bucket is not None
        self.consumer.free(deadline, last=self.bucket.meta.summary is not None)
        self.bucket = None

    def keep(self, deadline: Deadline) -> Kept:
        """Go on using, where it lies, all that the sync brought whose last bucket was taken. Raises UsageError when it
        came through memory that is used again and again."""
        consumer = self.consumer
        if not isinstance(consumer, MappedConsumer):
            raise UsageError(
                f"the weights of {self.channel.peer} come through a ring, where they cannot stay",
                fix="have them live in shared memory (adopt), or way=mapped",
            )
        self.bucket = None
        return consumer.keep(deadline)

    def close(self) -> None:
        """Part with the sender, and with the memory that it shared."""
        self.channel.close()
        for consumer in self._consumers.values():
            consumer.close()

    def _started(self, deadline: Deadline) -> Consumer:
        while True:
            start = _start(self.channel.receive(deadline))
            if start is not None and start.sync == self._sync:
                break
        if start.way not in _WAYS or (not start.fresh and start.way not in self._consumers):
            raise CorruptedError(f"{self.channel.peer} sends weights in a way that is not known here: {start.way}")
        if start.fresh:
            self._consumers[start.way] = _WAYS[start.way](self.channel, deadline)
        consumer = self._consumers[start.way]
        consumer.begin(start.told)
        return consumer


def _start(message: bytes) -> Start | None:
    try:
        return msgspec.msgpack.decode(message, type=Start)
    except msgspec.DecodeError:  # the rest of an earlier sync
        return None
