"""What all engines that move buckets share: packing, taking turns, verification, counts and times.

A backend adds how two sides meet (``_metadata``, ``build_topology``, ``_connect``, ``_disconnect``) and how one bucket
travels (``_put``, ``_take``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from rlctl.sync.buckets import NOWHERE, Buckets, FilledBucket
from rlctl.sync.engine import Arrivals, CheckpointEngine, EngineOptions, Member, Metadata, Stream, TransferStats
from rlctl.sync.errors import TransferError
from rlctl.sync.merging import Merger
from rlctl.sync.packer import Packer
from rlctl.sync.phase_clock import PhaseClock
from rlctl.sync.protocols import LoadReport
from rlctl.sync.shares import share
from rlctl.sync.targets import NO_TARGETS, Placements, Targets
from rlctl.sync.tensor_meta import BucketMeta
from rlctl.sync.unpacker import Unpacker
from rlctl.sync.work import Work, first_done

Acquire = Callable[[int], torch.Tensor]


class BucketEngine(CheckpointEngine):
    """Base of a backend that moves buckets. Only ranks that send, and rollout workers, hold memory."""

    # Whether large pieces travel apart, from where they lie to where they belong (see ``runs``).
    places: ClassVar[bool] = False

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        self.senders = options.senders  # those that there are, from ``init_process_group`` on
        self._memory: list[torch.Tensor] | None = None
        self._buckets: Buckets | None = None
        self._unpacker = Unpacker()
        self._register_s, self._bytes = 0.0, 0
        self._placements = Placements(NO_TARGETS)
        self._failed = False
        self._turn = 0  # syncs counted, to know one from the next

    # --- what a backend adds ---

    @abstractmethod
    def _metadata(self) -> Metadata:
        """Return what the others must know, called by every ``prepare``. Listen for them, if need be."""

    @abstractmethod
    def _connect(self, *args: Any, **kwargs: Any) -> None:
        """Meet the others, or keep what is there. The arguments, all by name, are those of ``build_topology``."""

    @abstractmethod
    def _disconnect(self, *, failed: bool) -> None:
        """End a sync. After a failure the others must notice, no thread may write into a bucket any more, and nothing
        may be left for the next sync to find. Called more than once; never waits for others."""

    @abstractmethod
    def _put(self, bucket: FilledBucket) -> Work[None]:
        """Begin to send a bucket to every rollout worker. Its memory stays as it is until the result was waited for;
        that may be while the next one is filled, so a slow call belongs in a thread."""

    @abstractmethod
    def _take(self, sender: int, buffer: torch.Tensor) -> Work[BucketMeta]:
        """Begin to receive trainer rank ``sender``'s next bucket into ``buffer`` (its first ``meta.used`` bytes).
        Awaited or Done, if several ranks may send: the first of them is waited for."""

    def _allocate(self) -> Buckets:
        """Return the memory of a member that needs any; called by its first ``prepare``."""
        count = 2 if self.member.role == "trainer" else self.slots
        return Buckets(self.slot_nbytes, count, memory=self._memory, device=self.options.device)

    def _packed(
        self, stream: Stream, acquire: Acquire, version: int, base_version: int | None
    ) -> Iterator[FilledBucket]:
        """Yield the buckets to ``_put``; ``acquire(k)`` is the memory of bucket k, once it is free."""
        return Packer(
            self.slot_nbytes,
            acquire,
            version=version,
            base_version=base_version,
            verify=self.options.verify,
            stays=self.stays if self.places else None,
            known=self.packed_before,
        ).pack(stream)

    def _register(self, buffers: list[torch.Tensor]) -> None:
        """Make buffers known to the transport; once, when they are allocated."""

    def placed(self, meta: BucketMeta) -> Mapping[int, torch.Tensor]:
        """Return the chunks of a bucket that are received right where they belong: number -> bytes."""
        return self._placements.of(meta) if self.places else NOWHERE

    def _finish(self) -> None:
        """Called when a sender's last bucket is through."""

    # --- the contract ---

    def use_memory(self, buffers: list[torch.Tensor]) -> None:
        """Use these ``slots`` buffers of ``slot_nbytes`` instead of fresh ones; before the first ``prepare``."""
        assert self._buckets is None
        self._memory = buffers

    @property
    def sends(self) -> bool:
        """Whether this member is a trainer rank that sends."""
        return self.member.role == "trainer" and self.member.rank < self.options.senders

    @property
    def extra_nbytes(self) -> int:
        """See CheckpointEngine."""
        return 0 if self._buckets is None else sum(b.numel() for b in self._buckets.buffers)

    def prepare(self, timeout: float | None = None) -> Metadata:
        """See CheckpointEngine."""
        self._begin(timeout)
        clock = PhaseClock()
        with clock.phase("register"):
            if self._buckets is None and (self.sends or self.member.role == "rollout"):
                self._buckets = self._allocate()
                self._register(self._buckets.buffers)
            metadata = self._metadata()
        self._register_s = clock.seconds["register"]
        return {"id": self.id, **metadata}

    def init_process_group(self, **kwargs: Any) -> None:
        """See CheckpointEngine. ``senders`` is how many trainer ranks send."""
        self.senders = kwargs.pop("senders")
        self._failed = True  # until a transfer has ended well
        clock = PhaseClock()
        with clock.phase("register"):
            self._connect(**kwargs)
        self._register_s += clock.seconds["register"]

    def send_weights(self, stream: Stream, version: int, *, base_version: int | None = None) -> TransferStats:
        """See CheckpointEngine."""
        clock = self._clock()
        works: deque[Work[None]] = deque()
        tensors = bytes_moved = 0

        def acquire(index: int) -> torch.Tensor:
            self.check_cancelled(f"before bucket {index}")
            with clock.phase("wire"):
                return self._buffer(index, works)

        gathered = clock.timed("gather", stream)
        with self._all_or_nothing(gathered), clock.phase("pack"):
            share = self._share(gathered)
            if self.sends:
                for bucket in self._packed(self._coded(share, base_version), acquire, version, base_version):
                    with clock.phase("wire"):
                        works.append(self._put(bucket))
                    bytes_moved += bucket.meta.used
                    tensors += sum(chunk.ends for chunk in bucket.meta.chunks)
                with clock.phase("wire"):
                    while works:
                        works.popleft().wait(self.deadline)
                    self._finish()
            else:
                deque(share, maxlen=0)
        return self._close_stats(clock, tensors=tensors, bytes_moved=bytes_moved)

    def receive_weights(self, version: int, *, base_version: int | None = None) -> Arrivals:
        """See CheckpointEngine."""
        clock = self._expect(version, base_version)
        with self._all_or_nothing(), clock.phase("unpack"):
            buckets = self._received(clock, version, base_version, self._own_buffer)
            for pair in self._unpacker.tensors(buckets):
                with clock.phase("load"):
                    yield pair
        self._end_receipt(clock)

    def receive_into(
        self,
        version: int,
        targets: Mapping[str, torch.Tensor],
        *,
        cast: bool = False,
        base_version: int | None = None,
    ) -> LoadReport:
        """See CheckpointEngine. Each byte is copied once, out of the bucket into its tensor."""
        clock = self._expect(version, base_version, self._unpacker.hold(targets))
        with self._all_or_nothing(), clock.phase("load"):
            buckets = self._received(clock, version, base_version, self._own_buffer)
            report = self._unpacker.into(buckets, targets, cast=cast)
        self._end_receipt(clock)
        return report

    def receive_buckets(
        self, version: int, acquire: Acquire, *, base_version: int | None = None
    ) -> Iterator[FilledBucket]:
        """See CheckpointEngine. Nothing is copied; each sender's counts and digests are checked, the tensors' own
        digests by who unpacks them."""
        clock = self._expect(version, base_version)
        tensors = nbytes = 0
        with self._all_or_nothing():
            for bucket in self._received(clock, version, base_version, acquire):
                tensors += sum(chunk.ends for chunk in bucket.meta.chunks)
                nbytes += bucket.meta.used
                if bucket.meta.summary is not None:
                    self.summary = bucket.meta.summary
                yield bucket
        self._close_stats(clock, tensors=tensors, bytes_moved=nbytes)

    def finalize(self) -> None:
        """See CheckpointEngine."""
        self._turn += 1
        self._disconnect(failed=self._failed or self._cancelled.is_set())

    def close(self) -> None:
        """See CheckpointEngine."""
        self._disconnect(failed=True)
        self._buckets = self._memory = None
        self._unpacker, self._placements = Unpacker(), Placements(NO_TARGETS)

    # --- inside ---

    def _buffer(self, index: int, works: deque[Work[None]]) -> torch.Tensor:
        """Return the buffer for the sender's bucket ``index``, when it is free."""
        assert self._buckets is not None
        while len(works) >= len(self._buckets.buffers):
            works.popleft().wait(self.deadline)
        return self._buckets.acquire(index)

    def _own_buffer(self, index: int) -> torch.Tensor:
        assert self._buckets is not None
        return self._buckets.acquire(index)

    def _share(self, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that this rank sends, and take all."""
        return share(stream, self.member.rank, self.senders)

    def _expect(self, version: int, base_version: int | None, targets: Targets = NO_TARGETS) -> PhaseClock:
        self._placements = self._placements.to(targets)
        self._unpacker.begin(version=version, base_version=base_version, verify=self.options.verify)
        self._bytes = 0
        return self._clock()

    def _clock(self) -> PhaseClock:
        clock = PhaseClock()
        clock.seconds["register"] = self._register_s
        return clock

    @contextmanager
    def _all_or_nothing(self, stream: Stream = ()) -> Iterator[None]:
        """Let the others know at once when this side fails; then take the rest of the ``stream``, a gather of all."""
        turn = self._turn
        try:
            yield
        except BaseException as error:
            if self._turn == turn:  # a generator left in the middle may be closed in the middle of a later sync
                self._disconnect(failed=True)
            if self.member.world > 1 and isinstance(error, TransferError):
                deque(stream, maxlen=0)
            raise
        self._failed = False

    def _received(
        self, clock: PhaseClock, version: int, base_version: int | None, acquire: Acquire
    ) -> Iterator[FilledBucket]:
        """Yield every sender's buckets as they come. All senders are on the wire at once, one bucket each; none is
        waited for while another has something: it may be in a gather with that one."""
        merger = Merger(self.senders, version=version, base_version=base_version, verify=self.options.verify)
        under_way: list[tuple[int, int, torch.Tensor, Work[BucketMeta]]] = []
        free = deque(range(self.slots))

        def post(sender: int) -> None:
            self.check_cancelled("before the next bucket")
            slot = free.popleft()
            buffer = acquire(slot)
            under_way.append((sender, slot, buffer, self._take(sender, buffer)))

        with clock.phase("wire"):
            for sender in range(self.senders):
                post(sender)
        while under_way:
            with clock.phase("wire"):
                place = first_done([work for *_, work in under_way], self.deadline)
                sender, slot, buffer, work = under_way.pop(place)
                meta = work.wait(self.deadline)
                if meta.summary is None:
                    post(sender)  # now, so that it travels while this one is read
            self._bytes += meta.used
            bucket = FilledBucket(meta, buffer[: meta.used], self.placed(meta))
            last = meta.summary is not None and not under_way
            yield bucket if self.senders == 1 else merger.add(sender, bucket, last=last)
            free.append(slot)

    def _end_receipt(self, clock: PhaseClock) -> None:
        self.summary = self._unpacker.summary
        assert self.summary is not None
        self._close_stats(clock, tensors=self.summary.tensors, bytes_moved=self._bytes)
