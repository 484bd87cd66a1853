"""Reading one sender's buckets, one after the other, in a thread of its own.

What goes right into tensors needs no bucket: where there is none yet, it is read before. Between two reads nobody else
has to be woken, which is what counts on a busy machine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import torch

from rlctl.sync.backends.mooncake_messages import Link, Told, decoded
from rlctl.sync.backends.mooncake_transport import Piece, Transport
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError, GivenUpError, PeerLostError
from rlctl.sync.fanout import acknowledge
from rlctl.sync.runs import Run, memory_of, runs
from rlctl.sync.tensor_meta import BucketMeta

Placed = Mapping[int, torch.Tensor]
# One read costs less than two: what belongs into a bucket is waited for this long.
_MOMENT = 0.002


class _Begun(NamedTuple):
    """A bucket that was told of: what of it is to be read into the bucket."""

    meta: BucketMeta
    left: list[tuple[Run, int]]


class Reader:
    """Reads from one sender in one sync.

    Args:
        link: to the sender.
        library: that reads.
        placed: gives the chunks of a bucket that are received right where they belong.
        deadline: of the sync.
    """

    def __init__(
        self, link: Link, library: Transport, placed: Callable[[BucketMeta], Placed], deadline: Deadline
    ) -> None:
        self.link = link
        self._library = library
        self._placed = placed
        self._deadline = deadline
        self._due: deque[tuple[torch.Tensor, Future[BucketMeta]]] = deque()
        self._change = threading.Condition()
        self._ended = False

    def take(self, buffer: torch.Tensor) -> Future[BucketMeta]:
        """Have the next bucket read into ``buffer``."""
        future: Future[BucketMeta] = Future()
        with self._change:
            if self._ended:
                raise self._given_up()
            self._due.append((buffer, future))
            self._change.notify_all()
        return future

    def run(self) -> None:
        """Read until the last bucket, an error, or ``end``: what the thread does."""
        try:
            last = False
            while not last:
                begun = self._begin()
                buffer, future = self._next()
                future.set_result(self._finish(begun, buffer))
                last = begun.meta.summary is not None
        except BaseException as error:  # noqa: BLE001 - it is handed to whoever waits
            self._fail(error)

    def end(self) -> None:
        """Wait for nothing more; from another thread. A read under way ends with its connection."""
        self.link.channel.end_waits()
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _begin(self) -> _Begun:
        """Take in what the sender tells of, and read it: what belongs into a bucket only if there is one by now."""
        told = decoded(self.link.channel.receive(self._deadline), Told)
        meta = BucketMeta.decode(told.meta)
        stretches = list(runs(meta))
        if len(stretches) != len(told.addresses):
            raise CorruptedError(f"bucket {meta.index} has {len(stretches)} runs, and {len(told.addresses)} addresses")
        placed = self._placed(meta)
        apart, left = list[Piece](), list[tuple[Run, int]]()
        for run, address in zip(stretches, told.addresses, strict=True):
            if run.chunk is not None and run.chunk in placed:
                memory = placed[run.chunk]
                apart.append(Piece(memory.data_ptr(), address, memory.numel()))
            else:
                left.append((run, address))
        with self._change:
            self._change.wait_for(lambda: self._due or self._ended, _MOMENT)
            buffer = self._due[0][0] if self._due else None
        if buffer is not None:
            apart += self._into(buffer, meta, left)
            left = []
        self._read(meta, apart)
        return _Begun(meta, left)

    def _next(self) -> tuple[torch.Tensor, Future[BucketMeta]]:
        with self._change:
            while not self._due:
                if self._ended:
                    raise self._given_up()
                self._change.wait()
            return self._due[0]

    def _finish(self, begun: _Begun, buffer: torch.Tensor) -> BucketMeta:
        self._read(begun.meta, self._into(buffer, begun.meta, begun.left))
        self.link.taken += 1
        acknowledge(self.link.channel, self.link.taken, self._deadline)
        with self._change:
            self._due.popleft()
        return begun.meta

    def _into(self, buffer: torch.Tensor, meta: BucketMeta, left: list[tuple[Run, int]]) -> list[Piece]:
        if meta.used > buffer.numel():
            raise CorruptedError(f"bucket {meta.index} has {meta.used} bytes, and {buffer.numel()} were agreed")
        memory = [(memory_of(run, buffer, {}), address) for run, address in left]
        return [Piece(m.data_ptr(), address, m.numel()) for m, address in memory]

    def _read(self, meta: BucketMeta, pieces: list[Piece]) -> None:
        if pieces and not self._library.read(self.link.segment, pieces):
            raise PeerLostError(
                f"reading bucket {meta.index} from {self.link.peer} failed after {self._deadline.elapsed:.1f} s"
            )

    def _fail(self, error: BaseException) -> None:
        """Hand an error to who waits now; who asks later is told that it is over."""
        with self._change:
            while not self._due and not self._ended:
                self._change.wait()
            self._ended = True
            for _, future in self._due:
                future.set_exception(error)
            self._due.clear()

    def _given_up(self) -> GivenUpError:
        return GivenUpError(f"reading from {self.link.peer} was given up")
