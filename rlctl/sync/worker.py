"""The checkpoint-engine worker: a process on the rollout side that receives for an inference process.

It can be killed when a library's call is stuck, and started again, while the inference process goes on serving. What
it receives lies in shared memory, which the inference process reads through an ``inlet``: a ring for weights that are
loaded as they arrive, a shadow for those that wait for a commit.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rlctl.process import Channel as ParentChannel
from rlctl.sync.bucket_engine import BucketEngine
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Channel, Listener
from rlctl.sync.engine import TransferStats
from rlctl.sync.errors import CorruptedError, DeadlineError, PeerLostError, TransferError
from rlctl.sync.host import EngineHost, serve_host
from rlctl.sync.ring import RingProducer
from rlctl.sync.ring_memory import slots_on
from rlctl.sync.shadow import Shadow
from rlctl.sync.tensor_meta import Size, TensorMeta
from rlctl.sync.tensor_shadow import TensorShadow
from rlctl.sync.unpacker import Unpacker

INFERENCE = "the inference process"
_CHECK_SECONDS = 0.1


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What an inlet says first: what it wants to read, and how many segments of which shadow it has mapped."""

    kind: str
    shadow: str = ""
    known: Size = 0


class Forwarded(msgspec.Struct):
    """What a worker received and handed on, or keeps for a commit.

    Attributes:
        stats: of the transfer.
        digest: of the whole sync.
        metas: the tensors, when they wait for a commit.
    """

    stats: TransferStats
    digest: bytes
    metas: list[TensorMeta] = msgspec.field(default_factory=list)


class WorkerHost(EngineHost):
    """The worker's commands: those of EngineHost, ``receive``, ``stage``, ``commit``."""

    cancellable = EngineHost.cancellable | {"commit"}

    def __init__(self) -> None:
        super().__init__()
        self._ring: RingProducer | None = None
        self._shadow: Shadow | None = None
        self._listener: Listener | None = None
        self._unpacker = Unpacker()
        self._staged: int | None = None

    def open(  # type: ignore[override]
        self, backend: str, role: Any, rank: int, world: int, options: Mapping[str, Any], address: str, part: int = 0
    ) -> None:
        """Make the engine, and listen for the inference process at ``address`` (``unix:PATH`` in a private folder)."""
        self._release()
        super().open(backend, role, rank, world, options, part)
        engine = self.engine
        memory = slots_on(engine.options.device, engine.slots, engine.slot_nbytes)
        self._ring = RingProducer(engine.slot_nbytes, memory=memory)
        self._shadow = (TensorShadow if engine.options.delta else Shadow)(engine.slot_nbytes)
        if isinstance(engine, BucketEngine):
            engine.use_memory(self._ring.slots)
        Path(address.removeprefix("unix:")).unlink(missing_ok=True)  # of a worker that was killed
        self._listener = Listener(address, engine.options.token.encode())

    def receive(self, version: int, consumers: int, base_version: int | None = None, cast: bool = False) -> Forwarded:
        """Receive, and hand each bucket to ``consumers`` inlets as it arrives. What they do with dtypes (``cast``) is
        their business."""
        assert self._ring is not None
        ring, engine = self._ring, self.engine
        ring.begin(engine.deadline)
        ring.forget_ended()  # an inference process that was started again comes anew
        try:
            while len(ring.peers) < consumers:
                channel, _ = self._accept("ring")
                ring.attach(channel, engine.deadline)
            with _closing(engine.receive_buckets(version, ring.acquire, base_version=base_version)) as received:
                for bucket in received:
                    ring.publish(bucket)
            ring.finish()
            if ring.lost:
                raise PeerLostError("; ".join(ring.lost.values()))
        except BaseException as error:
            ring.abort(str(error))
            for peer in ring.peers:
                ring.drop(peer, "the sync failed")
            raise
        finally:
            ring.lost.clear()
            self._end_drill()
        return self._forwarded(self._received_digest(), [])

    def stage(self, version: int, base_version: int | None = None, cast: bool = False) -> Forwarded:
        """Receive into the shadow, checking every tensor, and keep it for ``commit``."""
        assert self._ring is not None
        assert self._shadow is not None
        slots = self._ring.slots
        self._staged, self._shadow.buckets = None, []
        engine = self.engine
        verify, shadow = engine.options.verify, self._shadow
        self._unpacker.begin(version=version, base_version=base_version, verify=verify)
        try:
            if isinstance(shadow, TensorShadow):
                with closing(engine.receive_weights(version, base_version=base_version)) as tensors:
                    metas, digest = shadow.take(tensors, version=version, base_version=base_version, verify=verify)
                self._staged = version
                return self._forwarded(digest, metas)
            buckets = engine.receive_buckets(version, lambda k: slots[k % len(slots)], base_version=base_version)
            with _closing(buckets) as received:  # should a digest differ, the sender hears of it at once
                shadow.buckets = list(self._unpacker.relay(received, shadow.acquire))
        finally:
            self._end_drill()
        self._staged = version
        metas = [c.tensor for bucket in shadow.buckets for c in bucket.meta.chunks if c.ends]
        return self._forwarded(self._received_digest(), metas)

    def commit(self, version: int, consumers: int) -> None:
        """Hand the shadow to ``consumers`` inlets; nothing is to be done for a version that was not staged."""
        assert self._shadow is not None
        if self._staged is None:
            return
        if self._staged != version:
            raise TransferError(f"version {self._staged} is staged, and {version} was to be committed")
        for _ in range(consumers):
            channel, hello = self._accept("shadow")
            with channel:
                self._shadow.hand_over(channel, hello.shadow, hello.known, self.engine.deadline)
        self._staged = None
        if isinstance(self._shadow, TensorShadow):
            self._shadow.version = version

    def cancel(self) -> None:
        """See EngineHost. A wait for room in the ring ends, too: whoever reads it may be why."""
        super().cancel()
        if self._ring is not None:
            self._ring.end_waits()

    def close(self) -> None:
        """See EngineHost."""
        super().close()
        self._release()

    def _bases(self) -> dict[str, int | None]:
        # What the inference process holds is for the manager to know.
        return {"stage": self._shadow.version} if isinstance(self._shadow, TensorShadow) else {}

    def _received_digest(self) -> bytes:
        assert self.engine.summary is not None
        return self.engine.summary.digest

    def _forwarded(self, digest: bytes, metas: list[TensorMeta]) -> Forwarded:
        assert self._shadow is not None
        self.engine.stats.extra_nbytes += self._shadow.nbytes
        return Forwarded(self.engine.stats, digest, metas)

    def _accept(self, kind: str) -> tuple[Channel, Hello]:
        assert self._listener is not None
        deadline = self.engine.deadline
        while True:
            try:
                channel = self._listener.accept(INFERENCE, deadline.within(_CHECK_SECONDS), handshake=deadline)
                break
            except DeadlineError:
                deadline.check(f"waiting for {INFERENCE} to connect")
                self.engine.check_cancelled(f"before {INFERENCE} connected")
        hello = msgspec.msgpack.decode(channel.receive(deadline, limit=256), type=Hello)
        if hello.kind != kind:
            raise CorruptedError(f"{INFERENCE} wants to read a {hello.kind}, and a {kind} is due")
        return channel, hello

    def _release(self) -> None:
        for part in (self._ring, self._shadow, self._listener):
            if part is not None:
                part.close()
        self._ring = self._shadow = self._listener = None


@contextmanager
def _closing(buckets: Iterator[FilledBucket]) -> Iterator[Iterator[FilledBucket]]:
    """Have a transfer end with the block that reads it."""
    try:
        yield buckets
    finally:
        if isinstance(buckets, Generator):
            buckets.close()


def serve(channel: ParentChannel) -> None:
    """Entry point of a worker process."""
    serve_host(channel, WorkerHost())
