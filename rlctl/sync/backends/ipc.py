"""Weights between processes of one node, through memory that both see.

On the CPU there are two ways. ``mapped``: the weights live in shared memory (``adopt``), or are copied into it once;
receivers copy them out, each on its own, or use them where they lie (``map_weights``). ``ring``: they pass through a
few slots that stay in the cache. Option ``way``: one of them, or ``auto`` (the default): mapped when the first tensor
of a sync lives in shared memory. On CUDA: a ring of two buckets in device memory, one IPC handle for all syncs.

Each trainer rank that sends listens at a unix socket; each rollout worker connects to it once, for all syncs.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from rlctl.errors import UnavailableError, UsageError
from rlctl.sync.arena import WeightArena
from rlctl.sync.arena_packer import EXTENT_NBYTES, TOUCHED_NBYTES, ArenaPacker
from rlctl.sync.backends.ipc_link import Link
from rlctl.sync.backends.ipc_sender import DIRECT, MAPPED, RING, Producer, Sender
from rlctl.sync.backends.ipc_topology import connections, device_name, node, process
from rlctl.sync.backends.ipc_views import Views
from rlctl.sync.bucket_engine import Acquire, BucketEngine
from rlctl.sync.buckets import Buckets, FilledBucket
from rlctl.sync.direct import DirectPacker
from rlctl.sync.engine import CheckpointEngine, EngineOptions, Kwargs, Member, Metadata, Stream
from rlctl.sync.fanout import readable
from rlctl.sync.mapped_reader import Kept
from rlctl.sync.merging import Merger
from rlctl.sync.packer import Packer
from rlctl.sync.phase_clock import PhaseClock
from rlctl.sync.ring import SLOT_NBYTES, SLOTS, RingProducer
from rlctl.sync.ring_memory import device_slots
from rlctl.sync.tensor_meta import BucketMeta
from rlctl.sync.traits import BACKEND_TRAITS
from rlctl.sync.work import Done, Work


class IpcEngine(BucketEngine):
    """See the module."""

    name = "ipc"
    in_process = False  # whether tensors go from hand to hand where all are in one process

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        self._way: str = options.extras.get("way", "auto")
        if self._way not in (ways := ("auto", *BACKEND_TRAITS["ipc"].ways)):
            raise UsageError(f"{self._way!r} is no way of {self.name}", fix=f"one of {', '.join(ways)}")
        self._on_host = torch.device(options.device).type == "cpu"
        self._arena = WeightArena()
        self._sender: Sender | None = None
        self._producer: Producer | None = None
        self._links: dict[str, Link] = {}
        self._sources: list[Link] = []  # those of this sync
        self._share_place: int | None = None
        self._all_local = self._connected = False
        self._sync = ""
        self._views = Views()
        self._keeping: list[Kept] | None = None  # of this sync, when it is to stay where it lies

    @classmethod
    def available(cls) -> None:
        """See CheckpointEngine."""
        if not hasattr(os, "memfd_create"):
            raise UnavailableError("shared memory without a name needs Linux", fix="sync.backend=gloo")

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See CheckpointEngine: weights on the CPU come to live in shared memory."""
        if self._way != "ring" and self._on_host:
            self._arena.adopt(tensors.values())

    @property
    def arena(self) -> WeightArena:
        """The weights that live in shared memory; ``arena.begin_step`` before they change, if they are mapped."""
        return self._arena

    @property
    def sends(self) -> bool:
        """See BucketEngine. Before it is known who is fed by whom: each trainer rank on a device of its own may be."""
        if self._connected:
            return self._share_place is not None
        return super().sends or (self.member.role == "trainer" and not self._on_host)

    @property
    def extra_nbytes(self) -> int:
        """See CheckpointEngine."""
        return super().extra_nbytes + self._arena.nbytes

    @classmethod
    def build_topology(cls, trainer_world: int, rollout_world: int, metadata: Sequence[Metadata]) -> list[Kwargs]:
        """See CheckpointEngine."""
        return connections(cls.name, trainer_world, rollout_world, metadata)

    def receive_buckets(
        self, version: int, acquire: Acquire, *, base_version: int | None = None
    ) -> Iterator[FilledBucket]:
        """See CheckpointEngine: packed anew, since memory of the sender's is read, not the caller's written."""
        return CheckpointEngine.receive_buckets(self, version, acquire, base_version=base_version)

    def map_weights(self, version: int) -> Mapping[str, torch.Tensor]:
        """See CheckpointEngine. A sender calls ``arena.begin_step`` before it changes adopted weights: those that are
        read go on as they are, and it in a second copy. Raises UsageError where they come through a ring."""
        clock = self._expect(version, None)
        kept = self._keeping = []
        try:
            with self._all_or_nothing(), clock.phase("load"):
                tensors = dict(self._unpacker.tensors(self._received(clock, version, None, self._own_buffer)))
        finally:
            self._keeping = None
        self._views.take(tensors, kept)
        self._end_receipt(clock)
        return tensors

    def release_weights(self) -> None:
        """See CheckpointEngine."""
        self._views.let_go()

    def cancel(self) -> None:
        """See CheckpointEngine. Waits end at once."""
        super().cancel()
        if self._sender is not None:
            self._sender.end_waits()
        for link in list(self._links.values()):
            link.channel.end_waits()

    def close(self) -> None:
        """See CheckpointEngine. Weights that live in shared memory stay there."""
        self._views.let_go()
        super().close()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self._arena.close()

    # --- what BucketEngine asks for ---

    def _allocate(self) -> Buckets:
        if self.member.role == "rollout":
            return Buckets(0, memory=[])
        nbytes = self.slot_nbytes
        if self._on_host:
            ring = RingProducer(min(nbytes, SLOT_NBYTES), SLOTS)
        else:
            ring = RingProducer(nbytes, memory=device_slots(SLOTS, nbytes, self.options.device))
        self._sender = Sender(self.id, self.options.token, ring, self._arena)
        return Buckets(ring.slot_nbytes, memory=ring.slots)

    def _metadata(self) -> Metadata:
        self._sync = secrets.token_hex(8)
        self._part([s for s, link in self._links.items() if link.channel.ended()])
        return {
            "senders": self.options.senders,
            "address": self._sender.listen() if self._sender else "",
            "sync": self._sync,
            "held": self._sender.held() if self._sender else list(self._links),
            "device": device_name(self.options.device),
            "node": node(),
            "process": process(),
        }

    def _connect(
        self,
        *,
        receivers: Iterable[tuple[str, str, bool]] = (),
        share: int | None = None,
        local: bool = False,
        sources: Iterable[tuple[str, str, str, str, bool]] = (),
    ) -> None:
        self._share_place, self._all_local, self._connected = share, local, True
        if self._sender is not None:
            self._sender.connect(list(receivers), self.deadline)
        mine = {source: sync for source, sync, *_ in sources}
        self._part([s for s in self._links if s not in mine])
        for source, _, name, address, keep in sources:
            self._part([] if keep else [source])
            if source not in self._links:
                self._links[source] = Link.connect(address, self.id, self.options.token, name, self.deadline)
            self._links[source].channel.peer = name
        self._sources = [self._links[source] for source in mine]
        for link, sync in zip(self._sources, mine.values(), strict=True):
            link.expect(sync)

    def _disconnect(self, *, failed: bool) -> None:
        self._producer, self._connected = None, False
        if not failed:
            return
        if self._sender is not None:
            self._sender.part()
        self._part(list(self._links))
        self._sources = []

    def _part(self, sources: Iterable[str]) -> None:
        """Part with senders. Those do not know then what is read of them."""
        for source in [s for s in sources if s in self._links]:
            self._views.bring_home()
            self._links.pop(source).close()

    def _share(self, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        # One sender's share is everything; a rank that does not send takes part in the gathers all the same.
        return iter(stream) if self.senders == 1 else super()._share(stream)

    def _packed(
        self, stream: Stream, acquire: Acquire, version: int, base_version: int | None
    ) -> Iterator[FilledBucket]:
        assert self._sender is not None
        tensors = iter(stream)
        head = list(itertools.islice(tensors, 1))
        way = self._choose(head[0][1] if head else None)
        self._producer = self._sender.begin(way, self._sync, self.deadline)
        whole = itertools.chain(head, tensors)
        verify = self.options.verify
        if way == MAPPED:
            # An extent holds no memory, and between two of them the receiver's code has left the cache: so it is
            # larger than a bucket, unless small buckets ask for small steps.
            bucket = self.options.bucket_size
            extents = ArenaPacker(
                self._arena,
                self.deadline,
                version=version,
                base_version=base_version,
                verify=verify,
                extent_nbytes=bucket if bucket < TOUCHED_NBYTES else EXTENT_NBYTES,
            )
            return extents.pack(whole)
        if way == DIRECT:
            return DirectPacker(version=version, base_version=base_version, verify=verify).pack(whole)
        slot_nbytes = self._sender.ring.slot_nbytes
        return Packer(slot_nbytes, acquire, version=version, base_version=base_version, verify=verify).pack(whole)

    def _choose(self, first: torch.Tensor | None) -> str:
        if self.in_process and self._all_local:
            return DIRECT
        if not self._on_host or self._way == "ring":
            return RING
        lives_here = first is not None and self._arena.locate(first) is not None
        return MAPPED if lives_here or self._way == "mapped" else RING

    def _buffer(self, index: int, works: deque[Work[None]]) -> torch.Tensor:
        works.clear()
        assert self._sender is not None
        return self._sender.ring.acquire(index)

    def _put(self, bucket: FilledBucket) -> Work[None]:
        self.check_cancelled(f"at bucket {bucket.meta.index}")
        assert self._producer is not None
        self._producer.publish(bucket)
        return Done(None)

    def _finish(self) -> None:
        assert self._producer is not None
        self._producer.finish()

    def _take(self, sender: int, buffer: torch.Tensor) -> Work[BucketMeta]:
        return _Taking(self._sources[sender])

    def _received(
        self, clock: PhaseClock, version: int, base_version: int | None, acquire: Acquire
    ) -> Iterator[FilledBucket]:
        merger = Merger(self.senders, version=version, base_version=base_version, verify=self.options.verify)
        sending = list(range(len(self._sources)))
        nowhere = torch.empty(0, dtype=torch.uint8)
        while sending:
            self.check_cancelled("between two buckets")
            with clock.phase("wire"):
                sender = self._next(sending)
                link = self._sources[sender]
                meta = self._take(sender, nowhere).wait(self.deadline)
            assert link.bucket is not None
            self._bytes += meta.used
            if meta.summary is not None:
                sending.remove(sender)
            yield link.bucket if self.senders == 1 else merger.add(sender, link.bucket, last=not sending)
            with clock.phase("wire"):
                if self._keeping is not None and meta.summary is not None:
                    self._keeping.append(link.keep(self.deadline))
                else:
                    link.free(self.deadline)

    def _next(self, sending: Sequence[int]) -> int:
        """Return a sender that has something; whichever it is, so that none of them waits for another."""
        if len(sending) == 1:
            return sending[0]
        channels = {self._sources[sender].channel: sender for sender in sending}
        ready = [c for c in channels if c.pending] or readable(list(channels), self.deadline)
        if not ready:
            raise self.deadline.error(f"waiting for {', '.join(c.peer for c in channels)}")
        return channels[ready[0]]


class _Taking:
    """The next bucket of a sender, as work."""

    def __init__(self, link: Link) -> None:
        self.wait = link.take
