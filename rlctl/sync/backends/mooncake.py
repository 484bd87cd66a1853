"""Weights through Mooncake's Transfer Engine, over TCP or RDMA.

Workers read: trainer rank s < ``senders`` tells each of them over a channel of its own where the stretches of a bucket
are, in the bucket or in the weights themselves, and the worker has the library bring them into its bucket or its
tensors, says that it is through, and is told of the next. So nobody writes into memory of others, and a worker that
fails ends its own reads. Options (``extras``): ``protocol``, ``tcp`` (default) or ``rdma``, and ``device``, the RDMA
devices to use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import msgspec
import torch

from rlctl.errors import UsageError
from rlctl.sync.backends.mooncake_messages import Announcer, Hello, Link, Through, Told, decoded
from rlctl.sync.backends.mooncake_reader import Reader
from rlctl.sync.backends.mooncake_transport import Piece, Transport, ranges_of, require, shared
from rlctl.sync.bucket_engine import BucketEngine
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.calls import call
from rlctl.sync.channel import Listener, connect
from rlctl.sync.direct import settle
from rlctl.sync.engine import EngineOptions, Kwargs, Member, Metadata
from rlctl.sync.errors import CorruptedError, TransferError
from rlctl.sync.runs import APART_NBYTES, along, memory_of, runs
from rlctl.sync.tensor_meta import BucketMeta
from rlctl.sync.work import Awaited, InThread, Work

T = TypeVar("T")

PROTOCOLS = ("tcp", "rdma")
# A read that is under way when a worker gives up may end by itself in this time; else its connection is ended, and the
# library waits a second before it makes another.
_LET_END = 0.1
_AGAIN = 0.02


class MooncakeEngine(BucketEngine):
    """See the module."""

    name = "mooncake"
    places = True
    delivers = "slices"

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        self._protocol: str = options.extras.get("protocol", "tcp")
        if self._protocol not in PROTOCOLS:
            raise UsageError(f"{self._protocol!r} is no protocol of {self.name}", fix=f"one of {', '.join(PROTOCOLS)}")
        self._transport: Transport | None = None
        self._own: list[tuple[int, int]] = []  # registered: buckets
        self._weights: list[tuple[int, int]] | None = None  # registered: what is bound; None: not looked at yet
        self._listener: Listener | None = None
        self._announcers: dict[int, Announcer] = {}  # by the workers' rank in their replicas
        self._links: list[Link] = []
        self._readers: dict[int, Reader] = {}  # by sender
        self._pool: ThreadPoolExecutor | None = None
        self._reads: list[Future[Any]] = []

    @classmethod
    def available(cls) -> None:
        """See CheckpointEngine."""
        require("tcp")

    @classmethod
    def build_topology(cls, trainer_world: int, rollout_world: int, metadata: Sequence[Metadata]) -> list[Kwargs]:
        """See CheckpointEngine."""
        senders = min(metadata[0]["senders"], trainer_world)
        sources = [{key: m[key] for key in ("listener", "segment", "address")} for m in metadata[:senders]]
        parts = [m["part"] for m in metadata[trainer_world : trainer_world + rollout_world]]
        return [{"senders": senders, "sources": sources, "parts": parts} for _ in metadata]

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See CheckpointEngine. They are registered by the next ``prepare``, once."""
        self._forget_weights()
        super().bind(tensors)

    def placed(self, meta: BucketMeta) -> Mapping[int, torch.Tensor]:
        """See BucketEngine. RDMA needs the memory registered on this side, too."""
        found = super().placed(meta)
        if self._protocol == "tcp":
            return found
        return {number: data for number, data in found.items() if self._library.knows(data.data_ptr(), data.numel())}

    def cancel(self) -> None:
        """See CheckpointEngine. Waits and reads end at once."""
        super().cancel()
        for announcer in list(self._announcers.values()):
            announcer.end_waits()
        call(self._end_reads, "end of reads")

    def close(self) -> None:
        """See CheckpointEngine."""
        super().close()
        self._forget_weights()
        if self._transport is not None:
            self._transport.unregister(self._own)
            self._own = []
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    # --- what BucketEngine asks for ---

    def _register(self, buffers: list[torch.Tensor]) -> None:
        self._transport = shared(self.options.host, self._protocol, self.options.extras.get("device", ""))
        if self._exposes:
            self._own = self._transport.register(ranges_of(buffers))
            if not all(self._transport.knows(b.data_ptr(), b.numel()) for b in buffers):
                raise TransferError(
                    f"Mooncake does not take memory of {buffers[0].device}",
                    fix="a build of it for this device (mooncake-transfer-engine for CUDA), or sync.backend=gloo",
                )

    def _metadata(self) -> Metadata:
        self._disconnect(failed=False)
        if self._transport is None:  # a trainer rank that does not send
            return {"senders": self.options.senders}
        if self._exposes and self._weights is None:
            large = [t for t in self.bound.values() if t.nbytes >= APART_NBYTES and t.device.type == "cpu"]
            self._weights = self._transport.register(ranges_of(large))
        if self.sends:
            self._listener = Listener(f"tcp:{self.options.host}:0", self.options.token.encode())
        return {
            "senders": self.options.senders,
            "listener": self._listener.address if self._listener else "",
            "segment": self._transport.segment,
            "address": list(self._transport.address),
        }

    def _connect(self, *, sources: list[dict[str, Any]], parts: list[int]) -> None:
        if self.member.role == "rollout":
            self._pool = self._pool or ThreadPoolExecutor(self.options.senders + 1, thread_name_prefix="rlctl-mooncake")
            for rank, source in enumerate(sources):
                self._join(f"trainer {rank}", source)
        elif self._listener is not None:
            self._announcers = {part: Announcer(self.deadline) for part in self.parts}
            self._meet(self._listener, parts)

    def _put(self, bucket: FilledBucket) -> Work[None]:
        announcer = self._announcers[self.parts[self.lane]]
        found, addresses, lent = list(runs(bucket.meta)), list[int](), False
        small = along(found, bucket)
        for run in found:
            if small and run.chunk is None:
                continue
            memory = memory_of(run, bucket.data, bucket.placed)
            known = self._library.knows(memory.data_ptr(), memory.numel())
            lent = lent or not known or run.chunk not in bucket.placed
            if not known:
                memory = bucket.data[run.start : run.end].copy_(memory)
            addresses.append(memory.data_ptr())
        settle(bucket.data)
        inline = b"".join(bucket.data[run.start : run.end].numpy().data for run in small)
        count = announcer.tell(msgspec.msgpack.encode(Told(bucket.meta.encode(), addresses, inline)))
        return Through(announcer, count, f"bucket {bucket.meta.index}", lent=lent)

    def _finish(self) -> None:
        announcer = self._announcers[self.parts[self.lane]]
        announcer.wait(announcer.told, "the last bucket")

    def _take(self, sender: int, buffer: torch.Tensor) -> Work[BucketMeta]:
        reader = self._readers.get(sender)
        if reader is None:
            link = self._links[sender]
            reader = Reader(link, self._library, self.placed, self.slot_nbytes, self.deadline)
            self._readers[sender] = reader
            self._in_thread(reader.run, "reading")
        return Awaited(reader.take(buffer), f"waiting for a bucket of {reader.link.peer}")

    def _disconnect(self, *, failed: bool) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for announcer in self._announcers.values():
            announcer.close()
        self._announcers = {}
        self._end_reads()
        for link in self._links:
            link.channel.close()
        self._links, self._readers = [], {}

    # --- inside ---

    @property
    def _exposes(self) -> bool:
        """Whether memory of this member is to be known to the library: what is read from, with RDMA also where to."""
        return self.sends or self._protocol == "rdma"

    @property
    def _library(self) -> Transport:
        assert self._transport is not None
        return self._transport

    def _forget_weights(self) -> None:
        if self._transport is not None and self._weights:
            self._transport.unregister(self._weights)
        self._weights = None

    def _meet(self, listener: Listener, parts: list[int]) -> None:
        """Let the workers in: those that prove the token, and who else called the library's ports meanwhile goes."""
        gate = self._library.gate
        assert self._buckets is not None
        probe = self._buckets.buffers[0].data_ptr()
        waiting = []
        for _ in parts:
            channel = listener.accept("a rollout worker", self.deadline)
            hello = decoded(channel.receive(self.deadline, limit=64), Hello)
            if hello.rank >= len(parts):
                raise CorruptedError(f"rollout {hello.rank} came, and {len(parts)} take part")
            channel.peer = f"rollout {hello.rank}"
            self._announcers[parts[hello.rank]].attach(channel)
            waiting.append((channel, hello))
        lanes = list[int]()
        try:
            if any(not hello.lane for _, hello in waiting):
                gate.open()
            for channel, hello in waiting:
                channel.send(msgspec.msgpack.encode(0 if hello.lane else probe), self.deadline)
            for channel, _ in waiting:
                lanes.append(decoded(channel.receive(self.deadline, limit=16), int))
        finally:
            if self._protocol == "tcp":
                gate.shut()
                self._library.keep_only(lanes)

    def _join(self, peer: str, source: Mapping[str, Any]) -> None:
        channel = connect(source["listener"], self.options.token.encode(), peer, self.deadline)
        link = Link(peer, channel, source["segment"], (source["address"][0], source["address"][1]))
        self._links.append(link)
        hello = Hello(self.member.rank, self._library.lane(link.address))
        channel.send(msgspec.msgpack.encode(hello), self.deadline)
        probe = decoded(channel.receive(self.deadline, limit=16), int)
        if probe:
            self._try_lane(link, probe)
        channel.send(msgspec.msgpack.encode(self._library.lane(link.address)), self.deadline)

    def _try_lane(self, link: Link, probe: int) -> None:
        """Have the library connect, by reading a byte; after a lane was ended it takes its time."""
        assert self._buckets is not None
        piece = Piece(self._buckets.buffers[0].data_ptr(), probe, 1)
        what = f"connecting to {link.peer}"
        while not self._in_thread(lambda: self._library.read(link.segment, [piece]), what).wait(self.deadline):
            self.check_cancelled(f"while {what}")
            self.deadline.check(what)
            time.sleep(_AGAIN)

    def _in_thread(self, function: Callable[[], T], what: str) -> InThread[T]:
        assert self._pool is not None
        work = InThread(self._pool, function, what)
        self._reads = [read for read in self._reads if not read.done()]
        self._reads.append(work.future)
        return work

    def _end_reads(self) -> None:
        """End what reads, and return when nothing does any more."""
        links = list(self._links)
        for link in links:
            link.channel.end_waits()
        for reader in list(self._readers.values()):
            reader.end()
        running = wait(self._reads, timeout=_LET_END).not_done
        while running:
            for link in links:
                self._library.end_lane(link.segment, link.address)
            running = wait(running, timeout=_LET_END).not_done
