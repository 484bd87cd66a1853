"""One bucket on its way: its owner says where its bytes lie, a reader takes them from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from rlctl.sync.backends.nixl_agent import Batch, NixlAgent, Place
from rlctl.sync.backends.nixl_landing import Landing
from rlctl.sync.backends.nixl_links import READ, Announcement, Offer, Outlet, Source, Told, Waiting, decoded
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError
from rlctl.sync.runs import Run, along, memory_of, runs
from rlctl.sync.tensor_meta import BucketMeta

Placed = Callable[[BucketMeta], Mapping[int, torch.Tensor]]
# Buckets that a sender announces before the first of them was read, when it needs their memory for nothing else.
_AHEAD = 16
# Of those, how many a reader takes in a row.
_IN_A_ROW = 16


class Offers:
    """What a trainer rank tells of its buckets; what was found of one is kept while it, and what it is in, stay."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], _Found] = {}

    def of(self, bucket: FilledBucket, agent: NixlAgent) -> Offer:
        """Return what readers must know of a bucket that was packed."""
        registered, key = (agent.name, agent.registrations), bucket.meta.key
        found = self._last.get(key)
        if found is None or not found.fits(bucket, registered):
            found = self._last[key] = _Found.of(bucket, agent, registered)
        for run in found.moved:
            bucket.data[run.start : run.end].copy_(memory_of(run, bucket.data, bucket.placed))
        return Offer(
            bucket.meta.encode(), found.places, b"".join(found.small), found.lent, bucket.meta.summary is not None
        )


class _Found(NamedTuple):
    """What was found, and for what. ``small``: the runs that go with the message; ``moved``: those that nobody can read
    where they are, so that they are copied into the bucket."""

    bucket: FilledBucket
    registered: tuple[str, int]
    places: list[Place]
    small: list[memoryview]
    moved: list[Run]
    lent: bool

    def fits(self, bucket: FilledBucket, registered: tuple[str, int]) -> bool:
        mine = self.bucket
        return (
            self.registered == registered
            and mine.meta.chunks == bucket.meta.chunks
            and mine.data.data_ptr() == bucket.data.data_ptr()
            and mine.placed.keys() == bucket.placed.keys()
            and all(mine.placed[number] is memory for number, memory in bucket.placed.items())
        )

    @classmethod
    def of(cls, bucket: FilledBucket, agent: NixlAgent, registered: tuple[str, int]) -> _Found:
        found = list(runs(bucket.meta))
        small = along(found, bucket)
        places, moved, lent = list[Place](), list[Run](), False
        for run in found:
            if small and run.chunk is None:
                continue
            place = Place.of(memory_of(run, bucket.data, bucket.placed))
            if not agent.knows(place):  # nobody could read it there
                place = Place.of(bucket.data[run.start : run.end])
                moved.append(run)
            places.append(place)
            lent = lent or run.chunk not in bucket.placed
        told = [bucket.data[run.start : run.end].numpy().data for run in small]
        return cls(bucket, registered, places, told, moved, lent or bool(moved))


class BeingRead:
    """A bucket that was announced, as work: done when its memory may be used again.

    Args:
        outlet: its readers.
        offer: what they were told of it.
    """

    def __init__(self, outlet: Outlet, offer: Offer, waiting: Waiting, deadline: Deadline) -> None:
        self._outlet = outlet
        self._waiting = waiting
        outlet.wait(outlet.announced + 1 - _AHEAD, waiting, deadline)
        count = outlet.announce(waiting.agent, offer, deadline)
        self._count = count if offer.lent else 0

    def wait(self, deadline: Deadline) -> None:
        """See Work. Raises PeerLostError when no reader is left."""
        self._outlet.wait(self._count, self._waiting, deadline)
        self._outlet.require_readers()


class Taking:
    """A bucket to be received, as work. It begins to be read at once when it is known already where it lies.

    Args:
        source: where it comes from.
        buffer: for what is not read right into its place.
        placed: says which chunks are.
        outlet: those that read it from here, once it is here.

    Attributes:
        begun: whether it is being read.
        lent_until: how many buckets the outlet must have read before the buffer may be used again.
    """

    def __init__(
        self,
        source: Source,
        buffer: torch.Tensor,
        placed: Placed,
        outlet: Outlet | None,
        waiting: Waiting,
        deadline: Deadline,
    ) -> None:
        self._source = source
        self._buffer = buffer
        self._placed = placed
        self._outlet = outlet
        self._waiting = waiting
        self.begun = False
        self.lent_until = 0
        if source.told or waiting.ready([source.channel], 0):
            self._begin(deadline)

    @property
    def channel(self) -> Channel:
        """That it is announced on."""
        return self._source.channel

    def first_of(self, works: Sequence[object]) -> int:
        """See Sorted."""
        takings = [work for work in works if isinstance(work, Taking)]
        begun = [number for number, taking in enumerate(takings) if taking.begun]
        if begun:
            return begun[0]
        channels = [taking.channel for taking in takings]
        what = f"waiting for a bucket from {', '.join(channel.peer for channel in channels)}"
        return channels.index(self._waiting.readable(channels, what)[0])

    def wait(self, deadline: Deadline) -> BucketMeta:
        """See Work."""
        if not self.begun:
            self._waiting.readable([self.channel], f"waiting for a bucket from {self.channel.peer}")
            self._begin(deadline)
        if not self._here:
            self._waiting.finish(self._source, self._readings)
        if self._outlet is not None:
            count = self._outlet.announce(self._waiting.agent, self._offer, deadline)
            self.lent_until = count if self._offer.lent else 0
        if self._answer and not self._here:
            self.channel.send(READ, deadline)
        return self._meta

    def _begin(self, deadline: Deadline) -> None:
        source = self._source
        if not source.told:
            self._hear(deadline)
        told, meta, readings, self._here = source.told.popleft()
        if told.metadata:
            self._waiting.agent.meet(told.metadata, self.channel.peer)
        placed, inline, landings = self._placed(meta), bool(told.inline), source.landings
        landing = landings.get(meta.index)
        if landing is None or not landing.fits(meta, self._buffer, placed, inline=inline):
            landing = landings[meta.index] = Landing(meta, self._buffer, placed, inline=inline)
        landing.fill(told.inline)
        batches = landing.batches(told.places, meta.index, self.channel.peer)
        self._meta, self._answer = meta, told.answer
        self._offer = Offer(told.bucket, landing.here, told.inline, landing.lent, meta.summary is not None)
        self._readings = self._waiting.start(source, batches) if readings is None else readings
        self.begun = True

    def _hear(self, deadline: Deadline) -> None:
        """Take down what was announced, and begin to read what goes right to where it went last time. Of several
        buckets that are read in a row each costs less than one by one: after a copy of megabytes no code is in the
        cache. A bucket that others read from here goes on at once instead."""
        source, most = self._source, 1 if self._outlet is not None else _IN_A_ROW
        heard = list[tuple[Announcement, BucketMeta, Sequence[Batch] | None]]()
        while not heard or (
            len(heard) < most and heard[-1][2] is not None and self._waiting.ready([source.channel], 0)
        ):
            told = decoded(source.channel.receive(deadline), Announcement, source.channel.peer)
            meta = BucketMeta.decode(told.bucket)
            if meta.used > self._buffer.numel():
                raise CorruptedError(f"a bucket of {meta.used} bytes was announced")
            landing = None if told.metadata or most == 1 else source.landings.get(meta.index)
            apart = None if landing is None else landing.apart(meta, self._placed(meta), told.places)
            heard.append((told, meta, apart))
        row = [Told(t, m, None if apart is None else self._waiting.start(source, apart)) for t, m, apart in heard]
        source.told += self._answered(row, deadline)

    def _answered(self, row: list[Told], deadline: Deadline) -> list[Told]:
        """Answer for what was here as soon as its reading began: the source need not wait until it is unpacked."""
        begun = [told for told in row if told.readings is not None]
        readings = [reading for told in begun for reading in told.readings or ()]
        if any(reading.under_way for reading in readings):
            return row
        if begun:
            self._waiting.finish(self._source, readings)
        for told in begun:
            if told.announcement.answer:
                self.channel.send(READ, deadline)
        return [told._replace(answered=told.readings is not None) for told in row]
