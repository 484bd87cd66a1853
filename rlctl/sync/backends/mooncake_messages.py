"""What trainer ranks and workers of the mooncake engine tell each other, over channels that proved the run's token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError
from rlctl.sync.fanout import Fanout
from rlctl.sync.own_sockets import Address
from rlctl.sync.tensor_meta import Size

T = TypeVar("T")

# Buckets that a sender tells of before the first of them was read, when it needs their memory for nothing else.
_AHEAD = 16


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says first: its rank, and the own port of its lane to the sender, 0 when there is none."""

    rank: Size
    lane: Size


class Told(msgspec.Struct, frozen=True, array_like=True):
    """One bucket: its description, the addresses of its runs in the sender's memory, and the bytes of the small ones,
    if they are not to be read."""

    meta: bytes
    addresses: list[Size]
    inline: bytes


class Announcer(Fanout):
    """Tells all workers of buckets. See Fanout for what happens to one that does not keep up.

    Attributes:
        told: buckets so far.
    """

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._begin(deadline, math.inf)
        self.told = 0

    def attach(self, channel: Channel) -> None:
        """Let a worker take part."""
        self._acked[channel] = 0

    def tell(self, message: bytes) -> int:
        """Tell of a bucket; return its number, from 1."""
        self._tell(message)
        self.told += 1
        return self.told

    def wait(self, count: int, what: str) -> None:
        """Return when all workers are through with the first ``count`` buckets, or dropped. Raises PeerLostError."""
        self._wait(count, what)

    def end_waits(self) -> None:
        """End the waits; from another thread."""
        for channel in list(self._acked):
            channel.end_waits()


@dataclass
class Link:
    """A worker's way to one sender."""

    peer: str
    channel: Channel
    segment: str
    address: Address
    taken: int = 0


class Through:
    """A bucket under way to all workers: done when its memory may be used again, at once where nothing of it is to be
    read there, but for those that are told of too far ahead."""

    def __init__(self, announcer: Announcer, count: int, what: str, *, lent: bool) -> None:
        self._announcer = announcer
        self._count = count if lent else count - _AHEAD
        self._what = what

    def wait(self, deadline: Deadline) -> None:
        """See Work."""
        deadline.check(self._what)
        self._announcer.wait(self._count, self._what)


def decoded(data: bytes, kind: type[T]) -> T:
    """Return a message of a kind. Raises CorruptedError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptedError(f"a message cannot be read: {error}") from error
