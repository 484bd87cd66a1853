"""The sending side of engines that move buckets: one stream to all workers, or to each rank of the replicas its own."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from rlctl.sync.buckets import Buckets, FilledBucket
from rlctl.sync.engine import CheckpointEngine, EngineOptions, Member, Stream, TransferStats
from rlctl.sync.errors import TransferError
from rlctl.sync.phase_clock import PhaseClock
from rlctl.sync.shares import share
from rlctl.sync.work import Work

Acquire = Callable[[int], torch.Tensor]


class BucketSender(CheckpointEngine):
    """See the module.

    Attributes:
        senders: trainer ranks that send; from ``init_process_group`` on those that there are.
        parts: ranks of the replicas that take part in this sync; [0] where everybody gets whole tensors.
        lane: place in ``parts`` of those that buckets are sent to now.
    """

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        self.senders = self.options.senders
        self.parts = [0]
        self.lane = 0
        self._buckets: Buckets | None = None
        self._register_s = 0.0
        self._failed = False
        self._turn = 0  # syncs counted, to know one from the next

    @abstractmethod
    def _put(self, bucket: FilledBucket) -> Work[None]:
        """Begin to send a bucket to every rollout worker of ``parts[lane]``. Its memory stays as it is until the result
        was waited for; that may be while the next one is filled, so a slow call belongs in a thread."""

    @abstractmethod
    def _packed(
        self, stream: Stream, acquire: Acquire, version: int, base_version: int | None
    ) -> Iterator[FilledBucket]:
        """Yield the buckets to ``_put``; ``acquire(k)`` is the memory of bucket k, once it is free."""

    @abstractmethod
    def _disconnect(self, *, failed: bool) -> None:
        """End a sync. After a failure the others must notice, no thread may write into a bucket any more, and nothing
        may be left for the next sync to find. Called more than once; never waits for others."""

    def _finish(self) -> None:
        """Called when a sender's last bucket is through."""

    @property
    def sends(self) -> bool:
        """Whether this member is a trainer rank that sends."""
        return self.member.role == "trainer" and self.member.rank < self.options.senders

    def send_weights(self, stream: Stream, version: int, *, base_version: int | None = None) -> TransferStats:
        """See CheckpointEngine."""
        clock = self._clock()
        sent = (0, 0)
        gathered = clock.timed("gather", stream)
        with self._all_or_nothing(gathered), clock.phase("pack"):
            mine = self._share(gathered)
            if self.sends:
                sent = self._send(self._coded(mine, base_version), clock, version, base_version)
            else:
                deque(mine, maxlen=0)
        return self._close_stats(clock, tensors=sent[0], bytes_moved=sent[1])

    def send_slices(self, streams: Mapping[int, Stream], version: int) -> TransferStats:
        """See CheckpointEngine."""
        clock = self._clock()
        tensors = nbytes = 0
        with self._all_or_nothing(), clock.phase("pack"):
            self._begin_slices(streams, version)
            for lane in self._lanes():
                self.lane = lane
                sent = self._send(streams.get(self.parts[lane], ()), clock, version, None)
                tensors, nbytes = tensors + sent[0], nbytes + sent[1]
        return self._close_stats(clock, tensors=tensors, bytes_moved=nbytes)

    def _send(self, stream: Stream, clock: PhaseClock, version: int, base_version: int | None) -> tuple[int, int]:
        """Send a stream to its end, and return how many tensors and bytes that were."""
        works: deque[Work[None]] = deque()
        tensors = nbytes = 0

        def acquire(index: int) -> torch.Tensor:
            self.check_cancelled(f"before bucket {index}")
            with clock.phase("wire"):
                return self._buffer(index, works)

        for bucket in self._packed(stream, acquire, version, base_version):
            with clock.phase("wire"):
                works.append(self._put(bucket))
            nbytes += bucket.meta.used
            if bucket.meta.summary is not None:
                tensors = bucket.meta.summary.tensors
        with clock.phase("wire"):
            while works:
                works.popleft().wait(self.deadline)
            self._finish()
        return tensors, nbytes

    def _begin_slices(self, streams: Mapping[int, Stream], version: int) -> None:
        """Called before the first slice is sent."""

    def _lanes(self) -> Sequence[int]:
        """Return the order in which the ranks of replicas are sent to: each trainer rank begins with another."""
        lanes = len(self.parts)
        return [(self.member.rank + i) % lanes for i in range(lanes)]

    def _share(self, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that this rank sends, and take all."""
        return share(stream, self.member.rank, self.senders)

    def _buffer(self, index: int, works: deque[Work[None]]) -> torch.Tensor:
        """Return the buffer for the sender's bucket ``index``, when it is free."""
        assert self._buckets is not None
        while len(works) >= len(self._buckets.buffers):
            works.popleft().wait(self.deadline)
        return self._buckets.acquire(index)

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
