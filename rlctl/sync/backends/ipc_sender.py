"""A trainer rank's side of ``ipc``: it listens, keeps the connections to rollout workers, knows the ways to them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import msgspec

from rlctl.sync.arena import WeightArena
from rlctl.sync.channel import Channel, Listener
from rlctl.sync.deadline import Deadline
from rlctl.sync.direct import DirectProducer
from rlctl.sync.errors import GivenUpError, TransferError
from rlctl.sync.mapped import MappedProducer
from rlctl.sync.ring import RingProducer
from rlctl.sync.shared_memory import segment_name
from rlctl.sync.tensor_meta import Size

RING, MAPPED, DIRECT = "ring", "mapped", "direct"
Producer = RingProducer | MappedProducer | DirectProducer


class Start(msgspec.Struct, frozen=True, array_like=True):
    """How a sync begins on a connection.

    Attributes:
        sync: its name.
        way: that it goes.
        told: messages that went this way before.
        fresh: for this receiver it is the first.
    """

    sync: str
    way: str
    told: Size
    fresh: bool


class Sender:
    """See the module.

    Args:
        engine: id of the engine; names the socket.
        token: the run's.
        ring: for weights that pass through slots.
        arena: for weights that are read where they lie.
    """

    def __init__(self, engine: str, token: str, ring: RingProducer, arena: WeightArena) -> None:
        self._engine = engine
        self._token = token.encode()
        self._listener: Listener | None = None
        self._channels: dict[str, Channel] = {}
        self.ring = ring
        self._mapped = MappedProducer(arena)
        self._direct = DirectProducer()
        ring.aside = self._mapped.heard
        self._ways: dict[str, Producer] = {RING: ring, MAPPED: self._mapped, DIRECT: self._direct}

    def listen(self) -> str:
        """Return the address of the socket."""
        if self._listener is None or self._listener.closed:
            name = segment_name(self._engine[:12], secrets.token_hex(4))
            self._listener = Listener(f"unix:@{name}", self._token)
        return self._listener.address

    def held(self) -> list[str]:
        """Return the ids of the receivers that are connected."""
        for receiver in [r for r, channel in self._channels.items() if channel.closed or channel.ended()]:
            self._part(receiver)
        return list(self._channels)

    def connect(self, receivers: Iterable[tuple[str, str, bool]], deadline: Deadline) -> None:
        """Be connected to these receivers (id, name, whether there is a connection already), and no others.

        Raises DeadlineError, or GivenUpError after ``end_waits``.
        """
        names = {receiver: name for receiver, name, _ in receivers}
        keep = {receiver for receiver, _, kept in receivers if kept}
        for receiver in [r for r in self._channels if r not in keep]:
            self._part(receiver)
        for receiver in keep:
            self._channels[receiver].peer = names[receiver]
        while missing := [receiver for receiver in names if receiver not in self._channels]:
            waiting_for = ", ".join(names[receiver] for receiver in missing)
            channel = self._accept(waiting_for, deadline)
            try:
                receiver = channel.receive(deadline, limit=64).decode(errors="replace")
            except TransferError:  # it went away again
                channel.close()
                continue
            if receiver not in missing:
                channel.close()
                continue
            channel.peer = names[receiver]
            self._channels[receiver] = channel

    def begin(self, way: str, sync: str, deadline: Deadline) -> Producer:
        """Start a sync, and tell the receivers which way it goes. ``sync``: its name, which no other has."""
        producer = self._ways[way]
        producer.lost.clear()
        producer.begin(deadline)
        for channel in self._channels.values():
            try:
                known = producer.attached(channel)
                start = Start(sync, way, producer.told, fresh=not known)
                channel.send(msgspec.msgpack.encode(start), deadline)
                if not known:
                    producer.attach(channel, deadline)
            except TransferError as error:
                producer.lost[channel.peer] = error.message
                channel.close()
        return producer

    def end_waits(self) -> None:
        """Have every wait end now; from another thread."""
        if self._listener is not None:
            self._listener.close()
        for channel in list(self._channels.values()):
            channel.end_waits()

    def part(self) -> None:
        """Close all connections."""
        for receiver in list(self._channels):
            self._part(receiver)

    def close(self) -> None:
        """Close everything."""
        self.part()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for producer in self._ways.values():
            producer.close()

    def _accept(self, peer: str, deadline: Deadline) -> Channel:
        assert self._listener is not None
        try:
            return self._listener.accept(peer, deadline)
        except OSError as error:
            raise GivenUpError(f"the wait for {peer} to connect was given up") from error

    def _part(self, receiver: str) -> None:
        channel = self._channels.pop(receiver)
        for producer in self._ways.values():
            producer.detach(channel)
        channel.close()
