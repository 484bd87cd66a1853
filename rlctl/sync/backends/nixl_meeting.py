"""How the processes of a NIXL engine meet: who is to read connects to whom it reads from, once for all syncs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

from rlctl.sync.backends.nixl_agent import Batch, NixlAgent, Place
from rlctl.sync.backends.nixl_door import ports_to
from rlctl.sync.backends.nixl_links import Connected, Outlet, Source, Waiting, Welcome, decoded
from rlctl.sync.channel import Channel, Listener, connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, Kwargs, Metadata
from rlctl.sync.errors import CorruptedError, PeerLostError

# One read is not enough: the agents may go on to choose how they are connected while it is under way.
_GREETINGS = 3


class SourceOrder(NamedTuple):
    """Whom to read from: name of the link, of the peer, its address, whether the link is kept."""

    link: str
    peer: str
    address: str
    keep: bool


class ReaderOrder(NamedTuple):
    """Who is to read from here: the sender whose buckets, the reader's rank in its replica, name of the link, of the
    peer, whether the link is kept."""

    sender: int
    part: int
    link: str
    peer: str
    keep: bool


def topology(trainer_world: int, rollout_world: int, metadata: Sequence[Metadata]) -> list[Kwargs]:
    """Return who reads from whom, for each member. See ``CheckpointEngine.build_topology``.

    Each worker reads from every sender, or, in a chain, from the worker before it that gets the same. A link is kept
    when both ends still have it.
    """
    senders = min(metadata[0]["senders"], trainer_world)
    names = [f"trainer {rank}" for rank in range(trainer_world)] + [f"rollout {r}" for r in range(rollout_world)]
    parts = [m["part"] for m in metadata[trainer_world:]]
    result: list[Kwargs] = [{"senders": senders, "parts": parts, "readers": [], "sources": []} for _ in metadata]
    for sender in range(senders):
        before = dict.fromkeys(parts, sender)
        for place, part in enumerate(parts, trainer_world):
            previous = before[part]
            source, reader = metadata[previous], metadata[place]
            link = f"{source['id']} {reader['id']} {sender}"
            keep = link in source["links"] and link in reader["links"]
            result[previous]["readers"].append(ReaderOrder(sender, part, link, names[place], keep))
            result[place]["sources"].append(SourceOrder(link, names[previous], source["address"], keep))
            if metadata[0]["topology"] == "chain":
                before[part] = place
    return result


class Meeting:
    """The links of one process.

    Attributes:
        sources: of this sync, by sender.
        outlets: those that read from here, by sender and their rank in their replicas.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._token = options.token.encode()
        self._listener: Listener | None = None
        self._links: dict[str, Source] = {}
        self.greeting = torch.zeros(64, dtype=torch.uint8)
        self.sources: list[Source] = []
        self.outlets: dict[tuple[int, int], Outlet] = {}

    @property
    def links(self) -> list[str]:
        """The names of those whose other end is still there."""
        return [*self._links, *(link for outlet in self.outlets.values() for link in outlet.readers)]

    def listen(self) -> str:
        """Wait for readers from now on; return where."""
        self.deafen()
        self._listener = Listener(f"tcp:{self._options.host}:0", self._token)
        return self._listener.address

    def deafen(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def drop_ended(self, agent: NixlAgent) -> None:
        """Part with peers that have closed their end."""
        for link in [link for link, source in self._links.items() if source.channel.ended()]:
            self._part(link, agent)
        for outlet in self.outlets.values():
            outlet.keep({link for link, reader in outlet.readers.items() if not reader.channel.ended()})

    def read_from(self, orders: Sequence[SourceOrder], waiting: Waiting, deadline: Deadline) -> None:
        """Have exactly these sources."""
        kept = {order.link for order in orders if order.keep}
        for link in [link for link in self._links if link not in kept]:
            self._part(link, waiting.agent)
        for order in orders:
            if not order.keep:
                self._links[order.link] = self._source(order, waiting, deadline)
            self._links[order.link].channel.peer = order.peer
        self.sources = [self._links[order.link] for order in orders]

    def be_read_by(self, orders: Sequence[ReaderOrder], waiting: Waiting, deadline: Deadline) -> None:
        """Have exactly these readers."""
        kept = {order.link for order in orders if order.keep}
        for outlet in self.outlets.values():
            outlet.keep(kept)
        keys = {(order.sender, order.part) for order in orders}
        self.outlets = {key: self.outlets.get(key, Outlet()) for key in keys}
        for order in orders:
            if order.keep:
                self.outlets[order.sender, order.part].readers[order.link].channel.peer = order.peer
        due = {order.link: order for order in orders if not order.keep}
        if due:
            self._let_in(due, waiting, deadline)

    def _let_in(self, due: dict[str, ReaderOrder], waiting: Waiting, deadline: Deadline) -> None:
        arriving: dict[Channel, ReaderOrder | None] = {}  # None: it has not said who it is
        try:
            while due:
                assert self._listener is not None
                what = f"waiting for {', '.join(order.peer for order in due.values())} to connect"
                everything: list[Channel | Listener] = [self._listener, *arriving]
                for ready in waiting.readable(everything, what):
                    if isinstance(ready, Listener):
                        arriving[ready.accept("a rollout worker", deadline)] = None
                    elif (known := arriving[ready]) is None:
                        self._greet(ready, arriving, due, waiting.agent, deadline)
                    else:
                        told = decoded(ready.receive(deadline), Connected, known.peer)
                        waiting.agent.door.admit(told.ports)
                        del arriving[ready], due[known.link]
                        outlet = self.outlets[known.sender, known.part]
                        outlet.add(known.link, ready, waiting.agent.registrations, asks=not told.at_once)
        finally:
            waiting.agent.door.shut()
            for channel in arriving:
                channel.close()

    def forget_landings(self) -> None:
        """Let go what was worked out of where buckets go."""
        for source in self._links.values():
            source.landings.clear()

    def channels(self) -> Iterator[Channel]:
        """Yield every connection."""
        yield from [source.channel for source in self._links.values()]
        for outlet in list(self.outlets.values()):
            yield from [reader.channel for reader in list(outlet.readers.values())]

    def close(self) -> None:
        """Part with all."""
        self.deafen()
        for channel in self.channels():
            channel.close()
        self._links, self.sources, self.outlets = {}, [], {}

    def _part(self, link: str, agent: NixlAgent) -> None:
        source = self._links.pop(link)
        source.channel.close()
        if source.agent not in {other.agent for other in self._links.values()}:
            agent.part(source.agent)

    def _source(self, order: SourceOrder, waiting: Waiting, deadline: Deadline) -> Source:
        channel = connect(order.address, self._token, order.peer, deadline)
        try:
            channel.send(order.link.encode(), deadline)
            waiting.readable([channel], f"connecting to {order.peer}")
            welcome = decoded(channel.receive(deadline), Welcome, order.peer)
            if welcome.greeting.nbytes != self.greeting.numel():
                raise CorruptedError(f"{order.peer} greets with {welcome.greeting.nbytes} bytes")
            waiting.agent.meet(welcome.metadata, order.peer)
            source = Source(channel, welcome.agent)
            # The first read ends when both agents are connected; a later one shows whether it needs the other's answer.
            batches = [Batch([(Place.of(self.greeting), welcome.greeting)])]
            at_once = any(waiting.finish(source, waiting.start(source, batches)) for _ in range(_GREETINGS))
            told = Connected(ports_to(welcome.ports), at_once)
            channel.send(msgspec.msgpack.encode(told), deadline)
        except BaseException:
            channel.close()
            raise
        return source

    def _greet(
        self,
        channel: Channel,
        arriving: dict[Channel, ReaderOrder | None],
        due: dict[str, ReaderOrder],
        agent: NixlAgent,
        deadline: Deadline,
    ) -> None:
        try:
            order = due.get(channel.receive(deadline).decode(errors="replace"))
        except PeerLostError:  # before it said who it is
            order = None
        if order is None:  # of an earlier sync
            del arriving[channel]
            channel.close()
            return
        arriving[channel], channel.peer = order, order.peer
        agent.door.open()
        welcome = Welcome(agent.name, agent.metadata, sorted(agent.door.ports), Place.of(self.greeting))
        channel.send(msgspec.msgpack.encode(welcome), deadline)
