"""Weights the way of MoonshotAI's checkpoint-engine: staged in host memory, then a pipeline of three stages.

Every trainer rank first copies 1/N of the weights into host memory (pinned, when it has a device): from then on
(``staged``) the trainer may change its weights. Then its buckets are copied to the device, broadcast, and reloaded,
three buckets at a time: while workers reload one, the next travels, and the one after it is copied into the other of
the owner's two buffers. Owners take turns, so workers need two buffers, too. Where slices are
delivered, each rank stages what it holds of them, apart for each rank of a replica.

The host memory stays filled between syncs. A replica that joins late, or was restarted, gets that version from the
owners alone (``resend_weights``), while the trainer trains and the other replicas serve.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

import torch

from rlctl.errors import UsageError
from rlctl.sync.backends.collective import WAITING, CollectiveEngine, CollectiveGroup
from rlctl.sync.backends.gloo import GlooEngine
from rlctl.sync.backends.gloo_group import GlooGroup
from rlctl.sync.backends.hccl import HcclEngine
from rlctl.sync.backends.kimi_stage import HostStage
from rlctl.sync.backends.nccl import NcclEngine
from rlctl.sync.bucket_engine import Acquire
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, Member, Metadata, Stream, TransferStats
from rlctl.sync.errors import WrongBaseError
from rlctl.sync.merging import Merger
from rlctl.sync.phase_clock import PhaseClock
from rlctl.sync.rendezvous import MeetingStore
from rlctl.sync.shares import share
from rlctl.sync.tensor_meta import ALIGN, BucketMeta
from rlctl.sync.work import InThread, Work

COPY, BROADCAST, RELOAD = "copy", "broadcast", "reload"
# Device -> the backend whose group carries its buckets.
_CARRIERS: dict[str, type[NcclEngine]] = {"cuda": NcclEngine, "npu": HcclEngine}


class Event(NamedTuple):
    """One bucket in one stage of the pipeline, by this process (``time.monotonic``).

    Attributes:
        stage: COPY (host memory to buffer), BROADCAST, RELOAD (out of the buffer).
        bucket: the how manieth of this process.
        begin: for a broadcast when it was posted.
        end: for a broadcast on the sender when its end was noticed.
    """

    stage: str
    bucket: int
    begin: float
    end: float


class KimiEngine(CollectiveEngine):
    """See the module. Buckets are broadcast as the backend of the device does it: gloo, nccl or hccl.

    Attributes:
        staged: set while this rank's part of the weights is in host memory: what the trainer changes is not sent.
        events: what the last transfer did when.
    """

    name = "kimi"
    serves_late = True

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        kind = torch.device(options.device).type
        if kind not in ("cpu", *_CARRIERS):
            raise UsageError(f"backend {self.name} knows no device {options.device}", fix="cpu, cuda or npu")
        if kind in _CARRIERS:
            _CARRIERS[kind].available()
        self._kind = kind
        ranks = 1 if self.layouts is None else self.layouts.rollout.ranks
        self._stages = [HostStage(self.slot_nbytes, pinned=kind != "cpu") for _ in range(ranks)]
        self._again = False
        self._changes = False  # whether the stage has deltas in it
        self.staged = threading.Event()
        self.events: list[Event] = []

    @classmethod
    def available(cls) -> None:
        """See CheckpointEngine. On the CPU it needs gloo; what a device needs is looked at when one is asked for."""
        GlooEngine.available()

    @property
    def sends(self) -> bool:
        """See BucketEngine: every trainer rank owns a part."""
        return self.member.role == "trainer"

    @property
    def slots(self) -> int:
        """See CheckpointEngine. Owners take turns, so two do for any number of them."""
        return 2

    @property
    def slot_nbytes(self) -> int:
        """See CheckpointEngine."""
        return max(self.options.bucket_size // ALIGN * ALIGN, ALIGN)

    @property
    def extra_nbytes(self) -> int:
        """See CheckpointEngine: this rank's part and two buckets."""
        return super().extra_nbytes + sum(stage.nbytes for stage in self._stages)

    def resend_weights(self, version: int) -> TransferStats:
        """See CheckpointEngine: out of host memory, no tensor of the trainer's is touched."""
        if any(stage.version != version for stage in self._stages):
            raise WrongBaseError(f"{self.member}: version {version} is not in host memory any more")
        if self._changes:
            self._stage_base(version)
        self._again = True
        try:
            return self.send_weights((), version) if self.layouts is None else self.send_slices({}, version)
        finally:
            self._again = False

    def close(self) -> None:
        """See CheckpointEngine."""
        super().close()
        for stage in self._stages:
            stage.close()
        self.staged.clear()

    def _metadata(self) -> Metadata:
        return {**super()._metadata(), "senders": self.member.world}

    def _share(self, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        # All of it: the stage takes its part, which may begin or end within a tensor. But changes have one owner, who
        # keeps what they are made from.
        owned = share(stream, self.member.rank, self.member.world) if self.encoder is not None else iter(stream)
        return self._staging(owned)

    def _staging(self, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            self.check_cancelled(f"at tensor {name}")
            self.deadline.check(f"staging tensor {name}")
            yield name, tensor

    def _packed(
        self, stream: Stream, acquire: Acquire, version: int, base_version: int | None
    ) -> Iterator[FilledBucket]:
        if not self._again and self.layouts is None:
            self.staged.clear()
            self._fill(stream, version)
            self._changes = self.encoder is not None and self.encoder.stats.deltas > 0
            self.staged.set()
        for bucket in self._stages[self.parts[self.lane]].buckets(base_version):
            buffer = acquire(bucket.meta.index)[: bucket.meta.used]
            with self._noted(COPY, bucket.meta.index):
                buffer.copy_(bucket.data, non_blocking=True)  # what sends it waits for the device's stream
            yield FilledBucket(bucket.meta, buffer)

    def _fill(self, stream: Stream, version: int) -> None:
        owner, owners = (self.member.rank, self.member.world) if self.encoder is None else (0, 1)
        self._stages[0].fill(stream, version=version, verify=self.options.verify, owner=owner, owners=owners)

    def _begin_slices(self, streams: Mapping[int, Stream], version: int) -> None:
        """Stage what goes to each rank of a replica; a rank that is late gets it from there."""
        if self._again:
            return
        self.staged.clear()
        for part, stage in enumerate(self._stages):
            stream = self._staging(streams[part])
            stage.fill(stream, version=version, verify=self.options.verify, owner=0, owners=1)
        self.staged.set()

    def _lanes(self) -> Sequence[int]:
        # Workers hear their owners in turn, so all owners go through the ranks of a replica in one order.
        return range(len(self.parts))

    def _stage_base(self, version: int) -> None:
        """Stage whole tensors of ``version`` in the place of the changes that led there."""
        assert self.encoder is not None
        if self.encoder.version != version:
            raise WrongBaseError(f"{self.member}: only what changed in version {version} is in host memory")
        self._fill(self._staging(self.encoder.weights()), version)
        self._changes = False

    def _open_group(self, store: MeetingStore, rank: int, peers: list[str]) -> CollectiveGroup:
        if self._kind == "cpu":
            return GlooGroup(store, rank, peers, self.options.host, self.deadline)
        return _CARRIERS[self._kind].group_class(store, rank, peers, self.options.device, self.deadline)

    def _put(self, bucket: FilledBucket) -> Work[None]:
        return _Noted(self, bucket.meta.index, super()._put(bucket))

    def _take(self, sender: int, buffer: torch.Tensor) -> Work[BucketMeta]:
        assert self._pool is not None
        index = sum(event.stage == BROADCAST for event in self.events)

        def receive() -> BucketMeta:
            with self._noted(BROADCAST, index):
                return self._receive(sender, buffer)

        return InThread(self._pool, receive, WAITING)

    def _received(
        self, clock: PhaseClock, version: int, base_version: int | None, acquire: Acquire
    ) -> Iterator[FilledBucket]:
        merger = Merger(self.senders, version=version, base_version=base_version, verify=self.options.verify)
        turns = deque(range(self.senders))
        index = 0

        def post() -> tuple[torch.Tensor, Work[BucketMeta]]:
            self.check_cancelled(f"before bucket {index}")
            buffer = acquire(index)
            return buffer, self._take(turns[0], buffer)

        with clock.phase("wire"):
            under_way = post()
        while turns:
            with clock.phase("wire"):
                buffer, work = under_way
                meta = work.wait(self.deadline)
                owner, index = turns.popleft(), index + 1
                if meta.summary is None:
                    turns.append(owner)
                if turns:
                    under_way = post()  # now, so that it travels while this one is reloaded
            self._bytes += meta.used
            bucket = FilledBucket(meta, buffer[: meta.used])
            with self._noted(RELOAD, index - 1):
                yield bucket if self.senders == 1 else merger.add(owner, bucket, last=not turns)
                self._settle()

    def _clock(self) -> PhaseClock:
        self.events = []
        return super()._clock()

    @contextmanager
    def _noted(self, stage: str, bucket: int) -> Iterator[None]:
        begin = monotonic()
        yield
        self.note(stage, bucket, begin)

    def note(self, stage: str, bucket: int, begin: float) -> None:
        """Note that a bucket is through a stage now."""
        self.events.append(Event(stage, bucket, begin, monotonic()))


class _Noted:
    """A broadcast, whose end is noted."""

    def __init__(self, engine: KimiEngine, bucket: int, work: Work[None]) -> None:
        self._engine = engine
        self._bucket = bucket
        self._work = work
        self._begin = monotonic()

    def wait(self, deadline: Deadline) -> None:
        """See Work."""
        self._work.wait(deadline)
        self._engine.note(BROADCAST, self._bucket, self._begin)
