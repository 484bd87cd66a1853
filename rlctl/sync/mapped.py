"""The sender of weights that receivers read where they lie, in its arena. See ``mapped_messages``."""

from __future__ import annotations

import math

import torch

from rlctl.sync.arena import Block, Generation, WeightArena
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError, DeadlineError, PeerLostError, TransferError
from rlctl.sync.fanout import Fanout
from rlctl.sync.mapped_messages import Entry, Extent, NewSegment, Released, Table, answer, encode


class MappedProducer(Fanout):
    """The sender's side. See Fanout for what happens to a receiver that does not keep up.

    Args:
        arena: where the weights are.
    """

    def __init__(self, arena: WeightArena) -> None:
        super().__init__()
        self.arena = arena
        arena.readers = self
        self._table: list[Entry] = []
        self._told: dict[Channel, int] = {}  # entries of the table that a receiver knows
        self._mapped: dict[Channel, set[int]] = {}  # serials of the segments that a receiver has
        self._kept: dict[Channel, dict[int, set[int]]] = {}  # sync -> serials that a receiver still uses
        self._syncs = 0
        self._place = 0  # next entry of this sync
        self._serials: set[int] = set()  # used by this sync

    @property
    def told(self) -> int:
        """Syncs so far."""
        return self._syncs

    def attach(self, channel: Channel, deadline: Deadline) -> None:
        """Let a receiver at the other end of a unix socket take part from the next sync on."""
        self._acked[channel] = self._syncs
        self._told[channel], self._mapped[channel], self._kept[channel] = 0, set(), {}

    def begin(self, deadline: Deadline, *, stall: float = math.inf) -> None:
        """Start a sync: ``deadline`` for all of it, ``stall`` seconds for any one wait."""
        self._begin(deadline, stall)
        self._place, self._serials = 0, set()

    def publish(self, bucket: FilledBucket) -> None:
        """Tell every receiver of an extent; its bytes stay as they are until the receiver is through with them."""
        meta = bucket.meta
        entries = [Entry(chunk.tensor, chunk.offset) for chunk in meta.chunks]
        first, end = self._place, self._place + len(entries)
        if self._table[first:end] != entries:
            del self._table[first:]
            self._table += entries
            self._told = {channel: min(known, first) for channel, known in self._told.items()}
        self._place = end
        block, start = self._find(bucket.data)
        digests = [chunk.digest for chunk in meta.chunks] if any(c.digest for c in meta.chunks) else []
        current = None if block is None else block.current
        extent = Extent(
            serial=0 if current is None else current.serial,
            start=start,
            used=meta.used,
            writes=0 if current is None else current.writes,
            first=first,
            count=len(entries),
            index=meta.index,
            version=meta.version,
            digests=digests,
            summary=meta.summary,
        )
        if current is not None:
            self._serials.add(current.serial)
        message, deadline = encode(extent), self._patience()
        for channel in list(self._acked):
            try:
                self._tell_extent(channel, current, end, message, deadline)
            except (PeerLostError, DeadlineError) as error:
                self._drop(channel, error.message)

    def _tell_extent(
        self, channel: Channel, current: Generation | None, end: int, message: bytes, deadline: Deadline
    ) -> None:
        if current is not None and current.serial not in self._mapped[channel]:
            there, serials = self._mapped[channel], self.arena.serials()
            gone = [serial for serial in there if serial not in serials]
            there.difference_update(gone)
            channel.send(encode(NewSegment(current.serial, current.segment.nbytes, gone)), deadline)
            channel.send_fd(current.segment.fd, deadline)
            there.add(current.serial)
        known = self._told[channel]
        if known < end:
            channel.send(encode(Table(known, self._table[known:end])), deadline)
            self._told[channel] = end
        channel.send(message, deadline)

    def finish(self) -> None:
        """Wait until every receiver has everything. Raises PeerLostError when none is left."""
        self._syncs += 1
        del self._table[self._place :]
        self._told = {channel: min(known, self._place) for channel, known in self._told.items()}
        self._wait(self._syncs, "the end of the sync")

    def using(self, serial: int) -> list[str]:
        """See Readers."""
        now = Deadline(0)
        for channel in [c for c in self._acked if self._keeps(c, serial)]:
            try:
                while True:
                    self.heard(channel, channel.receive(now, limit=64))
            except DeadlineError:
                continue
            except TransferError as error:
                self._drop(channel, error.message)
        return [c.peer for c in self._acked if self._keeps(c, serial)]

    def wait_until_free(self, serial: int, deadline: Deadline) -> None:
        """See Readers."""
        for channel in list(self._acked):
            try:
                while self._keeps(channel, serial):
                    self.heard(channel, channel.receive(deadline, limit=64))
            except DeadlineError as error:
                raise deadline.error(f"weights cannot be changed while {channel.peer} reads both copies") from error
            except TransferError as error:
                self._drop(channel, error.message)

    def _keeps(self, channel: Channel, serial: int) -> bool:
        return any(serial in serials for serials in self._kept.get(channel, {}).values())

    def heard(self, channel: Channel, message: bytes) -> None:
        """See Fanout."""
        said = answer(message, channel.peer)
        if isinstance(said, Released):
            self._kept[channel].pop(said.number, None)
            return
        if said.number != self._acked[channel] + 1:
            raise CorruptedError(f"{channel.peer} is through with sync {said.number}, which it is not at")
        self._acked[channel] = said.number
        if said.keeps:
            self._kept[channel][said.number] = set(self._serials)

    def _find(self, data: torch.Tensor) -> tuple[Block | None, int]:
        if data.numel():
            for block in self.arena.blocks:
                start = block.offset_of(data.data_ptr(), data.numel())
                if start is not None:
                    return block, start
            raise AssertionError("the extent is not in the arena")
        return None, 0

    def detach(self, channel: Channel) -> None:
        """See Fanout."""
        super().detach(channel)
        self._told.pop(channel, None)
        self._mapped.pop(channel, None)
        self._kept.pop(channel, None)
