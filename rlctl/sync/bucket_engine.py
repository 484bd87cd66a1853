"""What all engines that move buckets share: packing, taking turns, verification, counts and times.

A backend adds how two sides meet (``_metadata``, ``build_topology``, ``_connect``, ``_disconnect``) and how one bucket
travels (``_put``, ``_take``). See ``bucket_sender`` for the sending side.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from rlctl.sync.bucket_sender import Acquire, BucketSender
from rlctl.sync.buckets import NOWHERE, Buckets, FilledBucket
from rlctl.sync.engine import Arrivals, EngineOptions, Member, Metadata, Stream
from rlctl.sync.merging import Merger
from rlctl.sync.packer import Packer
from rlctl.sync.phase_clock import PhaseClock
from rlctl.sync.protocols import LoadReport
from rlctl.sync.targets import NO_TARGETS, Placements, Targets
from rlctl.sync.tensor_meta import BucketMeta
from rlctl.sync.unpacker import Unpacker
from rlctl.sync.work import Work, first_done

__all__ = ["Acquire", "BucketEngine"]


class BucketEngine(BucketSender):
    """Base of a backend that moves buckets. Only ranks that send, and rollout workers, hold memory."""

    # Whether large pieces travel apart, from where they lie to where they belong (see ``runs``).
    places: ClassVar[bool] = False

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        self._memory: list[torch.Tensor] | None = None
        self._unpacker = Unpacker()
        self._bytes = 0
        self._placements = Placements(NO_TARGETS)

    # --- what a backend adds ---

    @abstractmethod
    def _metadata(self) -> Metadata:
        """Return what the others must know, called by every ``prepare``. Listen for them, if need be."""

    @abstractmethod
    def _connect(self, *args: Any, **kwargs: Any) -> None:
        """Meet the others, or keep what is there. The arguments, all by name, are those of ``build_topology``."""

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

    # --- the contract ---

    def use_memory(self, buffers: list[torch.Tensor]) -> None:
        """Use these ``slots`` buffers of ``slot_nbytes`` instead of fresh ones; before the first ``prepare``."""
        assert self._buckets is None
        self._memory = buffers

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
        return {"id": self.id, "part": self.member.part, **metadata}

    def init_process_group(self, **kwargs: Any) -> None:
        """See CheckpointEngine. ``senders``: how many trainer ranks send; ``parts``: each rollout member's, when slices
        are delivered."""
        self.senders = kwargs.pop("senders")
        self.parts = sorted(set(kwargs.get("parts", [0])))
        self._failed = True  # until a transfer has ended well
        clock = PhaseClock()
        with clock.phase("register"):
            self._connect(**kwargs)
        self._register_s += clock.seconds["register"]

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
        held = self._unpacker.hold(targets)
        clock = self._expect(version, base_version, held)
        with self._all_or_nothing(), clock.phase("load"):
            buckets = self._received(clock, version, base_version, self._own_buffer)
            report = self._unpacker.into(buckets, targets, cast=cast, held=held)
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

    def _own_buffer(self, index: int) -> torch.Tensor:
        assert self._buckets is not None
        return self._buckets.acquire(index)

    def _expect(self, version: int, base_version: int | None, targets: Targets = NO_TARGETS) -> PhaseClock:
        self._placements = self._placements.to(targets)
        self._unpacker.begin(version=version, base_version=base_version, verify=self.options.verify)
        self._bytes = 0
        return self._clock()

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
