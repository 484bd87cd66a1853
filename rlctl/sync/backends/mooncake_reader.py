"""Reading one sender's buckets, in a thread of its own, while who takes them unpacks those before.

What goes right into tensors needs no bucket: it is read before there is one, that of several buckets in one call of the
library where they were told of by then. Between two reads nobody else has to be woken, which is what counts on a busy
machine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from rlctl.sync.backends.mooncake_messages import Link, Told, decoded
from rlctl.sync.backends.mooncake_transport import Piece, Transport
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError, GivenUpError, PeerLostError
from rlctl.sync.fanout import acknowledge, readable
from rlctl.sync.runs import Run, memory_of, runs
from rlctl.sync.tensor_meta import BucketMeta

Placed = Mapping[int, torch.Tensor]
# One read costs less than two: what belongs into a bucket is waited for this long.
_MOMENT = 0.002
# Most buckets that are read in one call: it cannot be interrupted, but by ending its connection.
_IN_A_ROW = 8


class _Heard(NamedTuple):
    """A bucket that was told of: what is read right where it belongs, what is to be read into the bucket, and the small
    runs, if they came with the message."""

    meta: BucketMeta
    apart: list[Piece]
    left: list[tuple[Run, int]]
    small: list[Run]
    inline: bytes

    def into(self, buffer: torch.Tensor) -> list[Piece]:
        """Return what is to be read, if it is read into this bucket."""
        memory = [(memory_of(run, buffer, {}), address) for run, address in self.left]
        return [Piece(m.data_ptr(), address, m.numel()) for m, address in memory]

    def fill(self, buffer: torch.Tensor) -> None:
        """Bring what came with the message into the bucket."""
        data, cut = torch.from_numpy(np.frombuffer(self.inline, np.uint8).copy()), 0
        for run in self.small:
            buffer[run.start : run.end] = data[cut : cut + run.end - run.start]
            cut += run.end - run.start


class Reader:
    """Reads from one sender in one sync.

    Args:
        link: to the sender.
        library: that reads.
        placed: gives the chunks of a bucket that are received right where they belong.
        slot_nbytes: that a bucket may have.
        deadline: of the sync.
    """

    def __init__(
        self,
        link: Link,
        library: Transport,
        placed: Callable[[BucketMeta], Placed],
        slot_nbytes: int,
        deadline: Deadline,
    ) -> None:
        self.link = link
        self._library = library
        self._placed = placed
        self._slot_nbytes = slot_nbytes
        self._deadline = deadline
        self._due: deque[tuple[torch.Tensor, Future[BucketMeta]]] = deque()
        self._here: deque[_Heard] = deque()  # read, and not taken yet
        self._change = threading.Condition()
        self._ended = False

    def take(self, buffer: torch.Tensor) -> Future[BucketMeta]:
        """Have the next bucket brought into ``buffer``."""
        future: Future[BucketMeta] = Future()
        with self._change:
            if self._ended:
                raise self._given_up()
            self._due.append((buffer, future))
            self._hand_out()
            self._change.notify_all()
        return future

    def run(self) -> None:
        """Read until the last bucket, an error, or ``end``: what the thread does."""
        try:
            last = False
            while not last:
                row = self._row()
                self._bring(row)
                last = row[-1].meta.summary is not None
        except BaseException as error:  # noqa: BLE001 - it is handed to whoever waits
            self._fail(error)

    def end(self) -> None:
        """Wait for nothing more; from another thread. A read under way ends with its connection."""
        self.link.channel.end_waits()
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _row(self) -> list[_Heard]:
        """Return the buckets that are to be read in one call: the next, and those that were told of already, up to one
        of which something belongs into a bucket."""
        row: list[_Heard] = []
        while not row or (
            len(row) < _IN_A_ROW and not row[-1].left and row[-1].meta.summary is None and self._more_was_told()
        ):
            row.append(self._heard(decoded(self.link.channel.receive(self._deadline), Told)))
        return row

    def _more_was_told(self) -> bool:
        channel = self.link.channel
        return channel.pending or bool(readable([channel], Deadline(0.0)))

    def _heard(self, told: Told) -> _Heard:
        meta = BucketMeta.decode(told.meta)
        if meta.used > self._slot_nbytes:
            raise CorruptedError(f"bucket {meta.index} has {meta.used} bytes, and {self._slot_nbytes} were agreed")
        stretches = list(runs(meta))
        small = [run for run in stretches if run.chunk is None] if told.inline else []
        apart = [run for run in stretches if not told.inline or run.chunk is not None]
        if len(apart) != len(told.addresses) or len(told.inline) != sum(run.end - run.start for run in small):
            raise CorruptedError(f"bucket {meta.index} has other runs than its message tells of")
        heard, placed = _Heard(meta, [], [], small, told.inline), self._placed(meta)
        for run, address in zip(apart, told.addresses, strict=True):
            if run.chunk is not None and run.chunk in placed:
                memory = placed[run.chunk]
                heard.apart.append(Piece(memory.data_ptr(), address, memory.numel()))
            else:
                heard.left.append((run, address))
        return heard

    def _bring(self, row: Sequence[_Heard]) -> None:
        """Read a row, say so, and hand it out."""
        *before, last = row
        buffer = None if before or not last.left else self._buffer(_MOMENT)
        pieces = [piece for heard in row for piece in heard.apart]
        self._read(row, pieces if buffer is None else [*pieces, *last.into(buffer)])
        if last.left and buffer is None:
            self._add(before)
            before = []
            buffer = self._buffer(None)
            assert buffer is not None
            self._read([last], last.into(buffer))
        self.link.taken += len(row)
        acknowledge(self.link.channel, self.link.taken, self._deadline)
        self._add([*before, last])

    def _buffer(self, seconds: float | None) -> torch.Tensor | None:
        """Return where the bucket is due that comes after all that are here; None when it is not in time."""
        with self._change:
            self._change.wait_for(lambda: self._ended or (self._due and not self._here), seconds)
            if self._ended:
                raise self._given_up()
            return self._due[0][0] if self._due and not self._here else None

    def _add(self, row: Sequence[_Heard]) -> None:
        with self._change:
            self._here += row
            self._hand_out()

    def _hand_out(self) -> None:
        while self._due and self._here:
            buffer, future = self._due.popleft()
            heard = self._here.popleft()
            heard.fill(buffer)
            future.set_result(heard.meta)

    def _read(self, row: Sequence[_Heard], pieces: list[Piece]) -> None:
        """Raises PeerLostError, also when the sender has given up meanwhile: its memory may have changed."""
        what = f"reading bucket {row[0].meta.index} from {self.link.peer}"
        if pieces and not self._library.read(self.link.segment, pieces):
            raise PeerLostError(f"{what} failed after {self._deadline.elapsed:.1f} s")
        if self.link.channel.ended():
            raise PeerLostError(f"{what}: {self.link.peer} is gone: its connection closed")

    def _fail(self, error: BaseException) -> None:
        """Hand an error to who waits for what did not come; who asks later is told that it is over."""
        with self._change:
            while not self._due and not self._ended:
                self._change.wait()
            self._ended = True
            for _, future in self._due:
                future.set_exception(error)
            self._due.clear()

    def _given_up(self) -> GivenUpError:
        return GivenUpError(f"reading from {self.link.peer} was given up")
