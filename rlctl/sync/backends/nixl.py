"""Weights over NIXL: rollout workers read them, over UCX, out of the memory of the trainer or of each other.

Large tensors are read from where they lie into where they belong, when both sides keep their memory (``bind``); small
ones go together in buckets. Options: ``topology``: ``direct`` (each worker reads from the trainer; the default) or
``chain`` (each from the one before it, while that receives); ``keep_agents`` (default true): agents, connections and
registrations stay over syncs; ``devices`` and ``transports``: UCX's, else it uses the interface that sockets bind to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from rlctl.errors import UsageError
from rlctl.sync.backends.nixl_agent import NixlAgent, Place, addresses, storages
from rlctl.sync.backends.nixl_buckets import BeingRead, Offers, Taking
from rlctl.sync.backends.nixl_library import library
from rlctl.sync.backends.nixl_links import IDLE, Outlet, Waiting
from rlctl.sync.backends.nixl_meeting import Meeting, ReaderOrder, SourceOrder, topology
from rlctl.sync.bucket_engine import Acquire, BucketEngine
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.engine import EngineOptions, Kwargs, Member, Metadata
from rlctl.sync.phase_clock import PhaseClock
from rlctl.sync.protocols import LoadReport
from rlctl.sync.targets import NO_TARGETS, Placements
from rlctl.sync.tensor_meta import BucketMeta
from rlctl.sync.work import Work

TOPOLOGIES = ("direct", "chain")


class _Known(NamedTuple):
    """Which of a bucket's placed chunks an agent (name, registrations) can read into."""

    wanted: Mapping[int, torch.Tensor]
    registered: tuple[str, int]
    found: Mapping[int, torch.Tensor]


class NixlEngine(BucketEngine):
    """See the module."""

    name = "nixl"
    places = True
    delivers = "slices"

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        self._topology: str = options.extras.get("topology", "direct")
        if self._topology not in TOPOLOGIES:
            raise UsageError(f"{self._topology!r} is no topology of nixl", fix=f"one of {', '.join(TOPOLOGIES)}")
        library()  # now, since it takes longer than a sync
        self._agent: NixlAgent | None = None
        self._meeting = Meeting(options)
        self._waiting: Waiting | None = None  # of this sync
        self._lent: dict[int, tuple[Outlet, Taking]] = {}  # buffers that others may be reading, by address
        self._places: dict[int, Mapping[int, torch.Tensor]] = {}  # of buckets under way, by their meta's id
        self._offers = Offers()
        self._known_of, self._known = Placements(NO_TARGETS), dict[tuple[str, int], _Known]()
        self._lie: list[int] = []  # where what is bound lay in the last sync
        self._targets_seen: deque[frozenset[int]] = deque(maxlen=2)  # where those of the last syncs lay

    @classmethod
    def available(cls) -> None:
        """See CheckpointEngine."""
        library()

    @classmethod
    def build_topology(cls, trainer_world: int, rollout_world: int, metadata: Sequence[Metadata]) -> list[Kwargs]:
        """See CheckpointEngine."""
        return topology(trainer_world, rollout_world, metadata)

    @property
    def agent(self) -> NixlAgent:
        """This process's agent; there is one from ``prepare`` to a failure."""
        assert self._agent is not None
        return self._agent

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See CheckpointEngine. What was bound before is let go."""
        super().bind(tensors)
        self._lie = []
        self._targets_seen.clear()
        self._offers = Offers()

    def receive_into(
        self,
        version: int,
        targets: Mapping[str, torch.Tensor],
        *,
        cast: bool = False,
        base_version: int | None = None,
    ) -> LoadReport:
        """See CheckpointEngine. Large tensors are read right into ``targets`` that are bound, or that a sync of late
        had (a shadow takes turns with what is live); memory that is used once is not worth being registered."""
        if targets is not self.bound:
            found = storages(_on_host(targets))
            lie = frozenset(found)
            if lie in self._targets_seen:
                self.agent.register(found)
            self._targets_seen.append(lie)
        return super().receive_into(version, targets, cast=cast, base_version=base_version)

    def placed(self, meta: BucketMeta) -> Mapping[int, torch.Tensor]:
        """See BucketEngine."""
        return self._places.pop(id(meta))

    def _place(self, meta: BucketMeta) -> Mapping[int, torch.Tensor]:
        if self._known_of is not self._placements:  # other targets: what was kept holds memory of theirs
            self._known_of, self._known = self._placements, {}
            self._meeting.forget_landings()
        wanted, registered = super().placed(meta), (self.agent.name, self.agent.registrations)
        last = self._known.get(meta.key)
        if last is None or last.wanted is not wanted or last.registered != registered:
            known = {n: memory for n, memory in wanted.items() if self.agent.knows(Place.of(memory))}
            last = self._known[meta.key] = _Known(wanted, registered, known)
        self._places[id(meta)] = last.found
        return last.found

    def cancel(self) -> None:
        """See CheckpointEngine. Waits end at once."""
        super().cancel()
        for channel in self._meeting.channels():
            channel.end_waits()

    # --- what BucketEngine asks for ---

    def _metadata(self) -> Metadata:
        address = ""
        if self.sends or self.member.role == "rollout":
            agent = self._prepared_agent()
            self._meeting.drop_ended(agent)
            if self.sends or self._topology == "chain":
                address = self._meeting.listen()
        return {
            "senders": self.options.senders,
            "topology": self._topology,
            "address": address,
            "links": self._meeting.links,
        }

    def _prepared_agent(self) -> NixlAgent:
        assert self._buckets is not None
        where = addresses(self.bound.values())
        if self._agent is not None and where == self._lie and not self._targets_seen:
            return self._agent  # nothing but what is bound was registered, and that lies where it lay
        self._lie = where
        memory = storages([*self._buckets.buffers, self._meeting.greeting, *_on_host(self.bound)])
        if self._agent is not None and self._agent.outdated(frozenset(memory).union(*self._targets_seen)):
            self._end()
        self._agent = self._agent or NixlAgent(self.options)
        self._agent.register(memory)
        return self._agent

    def _connect(self, *, readers: Sequence[object], sources: Sequence[object], parts: Sequence[int]) -> None:
        if self._agent is None:
            return
        waiting = self._waiting = Waiting(self._agent, self.deadline, self.check_cancelled)
        self._meeting.read_from(msgspec.convert(sources, list[SourceOrder]), waiting, self.deadline)
        self._meeting.be_read_by(msgspec.convert(readers, list[ReaderOrder]), waiting, self.deadline)
        waiting.tick = min((outlet.tick for outlet in self._meeting.outlets.values()), default=IDLE)
        for channel in self._meeting.channels():  # a send that waits for its reader must not keep it from reading
            channel.meanwhile = partial(waiting.step, "saying where a bucket lies") if waiting.tick < IDLE else None
        self._lent, self._places = {}, {}

    def _put(self, bucket: FilledBucket) -> Work[None]:
        assert self._waiting is not None
        self._settle_device()  # what fills the bucket
        outlet = self._meeting.outlets[self.member.rank, self.parts[self.lane]]
        return BeingRead(outlet, self._offers.of(bucket, self.agent), self._waiting, self.deadline)

    def _finish(self) -> None:
        outlet = self._meeting.outlets[self.member.rank, self.parts[self.lane]]
        self._read_by_all(outlet)
        outlet.require_readers()

    def _take(self, sender: int, buffer: torch.Tensor) -> Work[BucketMeta]:
        assert self._waiting is not None
        self._settle_device()  # what empties the buffer
        outlet = self._meeting.outlets.get((sender, self.member.part))
        if buffer.data_ptr() in self._lent:  # the next of a chain reads what was there before
            lent_to, last = self._lent.pop(buffer.data_ptr())
            lent_to.wait(last.lent_until, self._waiting, self.deadline)
        taking = Taking(self._meeting.sources[sender], buffer, self._place, outlet, self._waiting, self.deadline)
        if outlet is not None:
            self._lent[buffer.data_ptr()] = outlet, taking
        return taking

    def _settle_device(self) -> None:
        """Wait for the device's own copies: NIXL does not know of them."""
        if torch.device(self.options.device).type != "cpu":
            torch.accelerator.current_stream(self.options.device).synchronize()

    def _read_by_all(self, outlet: Outlet) -> None:
        assert self._waiting is not None
        outlet.wait(outlet.announced, self._waiting, self.deadline)

    def _received(
        self, clock: PhaseClock, version: int, base_version: int | None, acquire: Acquire
    ) -> Iterator[FilledBucket]:
        yield from super()._received(clock, version, base_version, acquire)
        with clock.phase("wire"):
            for outlet in self._meeting.outlets.values():
                self._read_by_all(outlet)

    def _disconnect(self, *, failed: bool) -> None:
        self._meeting.deafen()
        if failed or not self.options.extras.get("keep_agents", True):
            self._end()

    def _end(self) -> None:
        """Part with everybody; after this the transport touches no memory."""
        self._meeting.close()
        self._waiting = None
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def _on_host(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return those that can be read where they lie, or into: on devices everything goes in buckets."""
    return [tensor for tensor in tensors.values() if tensor.device.type == "cpu"]
