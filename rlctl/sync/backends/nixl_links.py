"""The messages beside NIXL's reads: who reads from whom, where a bucket's bytes are, and when they were read.

They go over connections that proved the run's token; only then does a peer learn how to reach an agent's memory. A
connection that ends tells both sides at once that the other is gone.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from rlctl.sync.backends.nixl_agent import Batch, NixlAgent, Place, Reading
from rlctl.sync.backends.nixl_landing import Landing
from rlctl.sync.channel import Channel, Listener
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError, PeerLostError
from rlctl.sync.tensor_meta import BucketMeta

# Seconds between two answers of an agent to its peers: while one of them cannot read without, and else.
_ANSWERING, IDLE = 0.001, 0.02
_SLEEP = 0.0002
READ = b"read"  # what a reader says when it is through with a bucket and all before it, if it is asked to
# An answer wakes the other side, which costs more than it says: of these many buckets one is answered for.
_ANSWERED = 8

M = TypeVar("M", bound=msgspec.Struct)
C = TypeVar("C", bound=Channel | Listener)


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """What a reader learns first: the agent's name, metadata and ports, and a few bytes to read, which connects the
    agents."""

    agent: str
    metadata: bytes
    ports: list[int]
    greeting: Place


class Connected(msgspec.Struct, frozen=True, array_like=True):
    """What a reader says when it has read: the ports that it called from, and whether it can read while the agent that
    it reads from does not answer."""

    ports: list[int]
    at_once: bool


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """A bucket that can be read: its encoded description; where its runs lie; the bytes of small runs, if they are not
    to be read; the agent's metadata, when there is more of it than the reader knows; whether the reader is to say when
    it is through."""

    bucket: bytes
    places: list[Place]
    inline: bytes
    metadata: bytes
    answer: bool


class Offer(NamedTuple):
    """What an announcement says of a bucket. ``lent``: whether a part of it lies in the memory of a bucket; ``last``:
    of the sync."""

    bucket: bytes
    places: list[Place]
    inline: bytes
    lent: bool
    last: bool


class Told(NamedTuple):
    """A bucket that was announced. ``readings``: that were begun when it came, if any; ``answered``: whether it is here
    and was answered for, if that was asked."""

    announcement: Announcement
    meta: BucketMeta
    readings: list[Reading] | None
    answered: bool = False


@dataclass
class Source:
    """A peer that this process reads from. ``landings``: where its buckets went last, by index; ``told``: buckets that
    it announced, and that are not taken yet."""

    channel: Channel
    agent: str
    landings: dict[int, Landing] = field(default_factory=dict)
    told: deque[Told] = field(default_factory=deque)


@dataclass
class Reader:
    """A peer that reads from this process. ``known``: the regions that it was told of; ``asks``: whether it cannot read
    while this process's agent does not answer; ``through``: buckets that it has read; ``due``: those that it is to
    answer for, by number."""

    channel: Channel
    known: int
    asks: bool
    through: int = 0
    due: deque[int] = field(default_factory=deque)


class Waiting:
    """How an engine reads and waits: until its deadline, unless it is given up, while its agent answers its readers.

    Attributes:
        agent: of this process.
        tick: seconds between two answers.
    """

    def __init__(self, agent: NixlAgent, deadline: Deadline, check: Callable[[str], None]) -> None:
        self.agent = agent
        self.tick = _ANSWERING
        self._deadline = deadline
        self._check = check

    def step(self, what: str) -> None:
        """Do what must be done now and then. Raises DeadlineError, GivenUpError."""
        self._look(what)
        self.agent.progress()

    def ready(self, found: Sequence[C], seconds: float) -> list[C]:
        """Return those of ``found`` that something can be read from within ``seconds``."""
        poll = select.poll()
        by_number = {one.fileno(): one for one in found}
        for number in by_number:
            poll.register(number, select.POLLIN)
        pending = {number for number, one in by_number.items() if isinstance(one, Channel) and one.pending}
        return [by_number[number] for number in pending or dict(poll.poll(seconds * 1000))]

    def readable(self, found: Sequence[C], what: str) -> list[C]:
        """Return those of ``found`` that something can be read from, at least one."""
        while not (ready := self.ready(found, self.tick)):
            self.step(what)
        return ready

    def start(self, source: Source, batches: Sequence[Batch]) -> list[Reading]:
        """Begin to read. Raises PeerLostError, DeadlineError, GivenUpError."""
        under_way: list[Reading] = []
        what = f"reading from {source.channel.peer}"
        for batch in batches:
            if self.tick < IDLE:  # peers cannot read from here while this reads, unless they are answered
                self.step(what)
            else:
                self._look(what)
            under_way += self.agent.read(source.agent, source.channel.peer, batch)
        return under_way

    def _look(self, what: str) -> None:
        self._check(what)
        self._deadline.check(what)

    def finish(self, source: Source, under_way: Sequence[Reading]) -> bool:
        """Wait until all is here; return whether it was from the start. Makes sure that the source had not given up
        meanwhile: then its memory may have changed. Raises PeerLostError, DeadlineError, GivenUpError."""
        peer, at_once = source.channel.peer, True
        while not all(self.agent.done(reading) for reading in under_way) and not source.channel.ended():
            at_once = False
            time.sleep(_SLEEP)
            self.step(f"reading from {peer}")
        if source.channel.ended():
            raise PeerLostError(f"{peer} is gone: its connection closed")
        return at_once


def decoded(message: bytes, kind: type[M], peer: str) -> M:
    """Return a message as what it must be. Raises CorruptedError."""
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptedError(f"a message of {peer} cannot be read: {error}") from error


class Outlet:
    """Those that read one sender's buckets from this process. One that is lost is dropped.

    Attributes:
        readers: by the name of the link.
        announced: buckets of all syncs.
        lost: why each of them was dropped.
    """

    def __init__(self) -> None:
        self.readers: dict[str, Reader] = {}
        self.announced = self._asked = 0
        self.lost: list[str] = []

    def add(self, link: str, channel: Channel, known: int, *, asks: bool) -> None:
        """Have one more reader."""
        self.readers[link] = Reader(channel, known, asks, self.announced)

    def announce(self, agent: NixlAgent, offer: Offer, deadline: Deadline) -> int:
        """Tell of a bucket; return how many there were."""
        self.announced += 1
        answer = offer.lent or offer.last or self.announced % _ANSWERED == 0
        self._asked = self.announced if answer else self._asked
        for link, reader in list(self.readers.items()):
            fresh = agent.metadata if reader.known < agent.registrations else b""
            reader.known = agent.registrations
            told = Announcement(offer.bucket, offer.places, offer.inline, fresh, answer)
            if answer:
                reader.due.append(self.announced)
            try:
                reader.channel.send(msgspec.msgpack.encode(told), deadline)
            except PeerLostError as error:
                self._drop(link, error)
        return self.announced

    def wait(self, count: int, waiting: Waiting, deadline: Deadline) -> None:
        """Return when the readers that there are have read ``count`` buckets, or as many as they answer for."""
        count = min(count, self._asked)
        while late := [reader for reader in self.readers.values() if reader.through < count]:
            names = ", ".join(reader.channel.peer for reader in late)
            ready = waiting.readable([reader.channel for reader in late], f"waiting for {names} to read a bucket")
            for link, reader in list(self.readers.items()):
                if reader.channel in ready:
                    self._hear(link, reader, deadline)

    @property
    def tick(self) -> float:
        """Seconds between two answers to those that read."""
        return _ANSWERING if any(reader.asks for reader in self.readers.values()) else IDLE

    def require_readers(self) -> None:
        """Raise PeerLostError when none is left."""
        if not self.readers:
            raise PeerLostError("; ".join(self.lost) or "no rollout worker is left")

    def keep(self, links: set[str]) -> None:
        """Part with all others."""
        for link in [link for link in self.readers if link not in links]:
            self.readers.pop(link).channel.close()

    def _hear(self, link: str, reader: Reader, deadline: Deadline) -> None:
        try:
            if reader.channel.receive(deadline) != READ or not reader.due:
                raise CorruptedError(f"{reader.channel.peer} said something else than that it has read")
            reader.through = reader.due.popleft()
        except PeerLostError as error:
            self._drop(link, error)

    def _drop(self, link: str, error: PeerLostError) -> None:
        self.readers.pop(link).channel.close()
        self.lost.append(error.message)
