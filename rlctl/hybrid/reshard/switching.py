"""One switch: slices cut and cast, messages and collectives, slices put in place, a few messages at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from rlctl.hybrid.reshard.idle_memory import IdleMemory
from rlctl.hybrid.reshard.memory import Slot, shards
from rlctl.hybrid.reshard.micro_groups import Gather
from rlctl.hybrid.reshard.pieces import Message, Piece
from rlctl.hybrid.reshard.report import PHASES, SwitchReport
from rlctl.hybrid.reshard.schedule import Schedule
from rlctl.hybrid.reshard.watch import Watch
from rlctl.hybrid.reshard.wire import Counts, Parcel, Pending, Wire
from rlctl.keys.dtypes import torch_dtype
from rlctl.sync.boxes import Box, intersect, shift, slices
from rlctl.sync.cutting import aligned
from rlctl.sync.errors import MismatchError

# Rounds that are under way at once: one is cut or put in place while another is on the wire.
DEPTH = 2


class _Posted(NamedTuple):
    """What was posted of some messages, and those that are left."""

    pending: Pending
    left: Sequence[Message]


class Run:
    """One switch.

    Args:
        plan: this rank's part of it.
        held: training shards.
        wire: to the others.
        watch: told of each phase.
        idle: memory for generation shards and slots.
    """

    def __init__(
        self, plan: Schedule, held: Mapping[str, torch.Tensor], wire: Wire, watch: Watch, idle: IdleMemory
    ) -> None:
        self._idle = idle
        self._schedule = plan
        self._held = {name: tensor.detach() for name, tensor in held.items()}
        self._wire = wire
        self._watch = watch
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._extra = 0
        self._staged = self._copied = 0
        self._shards: dict[str, torch.Tensor] = {}
        # Of each training shard, the parts that are in generation shards here.
        self._placed: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        # What leaves and arrives where it lies; asked for more than once.
        self._leaves: dict[tuple[tuple[str, Box], ...], torch.Tensor | None] = {}
        self._lands: dict[tuple[str, Box], torch.Tensor | None] = {}

    def all(self, into: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Return the generation shards, filled."""
        device = next((tensor.device for tensor in self._held.values()), torch.device("cpu"))
        with self._phase("cut"):
            self._take_memory(into, device)
        self._gather(device)
        self._exchange(device)
        return self._shards

    def _copy(self) -> None:
        with self._phase("place"):
            for piece in self._schedule.copies:
                target, source = self._target(piece), self._source(piece)
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)
                    self._copied += piece.nbytes
                self._placed.setdefault(piece.src, []).append((piece.src_box, target))

    def _exchange(self, device: torch.device) -> None:
        """Send and receive all messages."""
        rounds = [self._schedule.round(number) for number in range(self._schedule.rounds)]
        # A message that finds its reader ready leaves at once, so all that can are posted, readers first.
        came = [self._post_in_place(receives, self._landing) for _, receives in rounds]
        self._copy()
        went = [self._post_in_place(sends, self._leaving) for sends, _ in rounds]
        staged = [(out.left, of.left) for out, of in zip(went, came, strict=True) if out.left or of.left]
        slots = [Slot(self._slot_nbytes(staged[parity::DEPTH]), device, self._idle) for parity in range(DEPTH)]
        # The one for collectives is gone by now.
        self._extra += max(self._staged, sum(slot.nbytes for slot in slots))
        under_way: list[tuple[Pending, list[tuple[Message, torch.Tensor]]]] = []
        for number, messages in enumerate(staged):
            if len(under_way) == DEPTH:
                self._finish(*under_way.pop(0))
            under_way.append(self._start(*messages, slots[number % DEPTH]))
        for started in under_way:
            self._finish(*started)
        with self._phase("wire", waits=True):
            for posted in (*came, *went):
                self._wire.wait(posted.pending)

    def _gather(self, device: torch.device) -> None:
        gathers = self._schedule.gathers
        if not gathers:
            return
        slot = Slot(max(len(gather.ranks) * gather.nbytes for gather in gathers), device, self._idle)
        self._staged = slot.nbytes
        for gather in gathers:
            slot.clear()
            data = slot.take(len(gather.ranks) * gather.nbytes)
            parts = data.chunk(len(gather.ranks))
            with self._phase("cut"):
                place = gather.ranks.index(self._watch.rank)
                for piece, part in _laid(gather, place, parts[place]):
                    part.copy_(self._source(piece))
            with self._phase("wire", waits=True):
                self._wire.gather(gather.ranks, data)
            with self._phase("place"):
                for other in range(len(parts)):
                    if other != place:
                        for piece, part in _laid(gather, other, parts[other]):
                            self._target(piece).copy_(part)

    def report(self, rank: int) -> SwitchReport:
        """Return what it took."""
        counts: Counts = self._wire.counts
        return SwitchReport(
            sent_bytes=sum(n for (src, _), n in counts.pairs.items() if src == rank),
            received_bytes=sum(n for (_, dst), n in counts.pairs.items() if dst == rank),
            num_all_gather=counts.num_all_gather,
            num_p2p=counts.num_p2p,
            max_latency_ms=1000 * counts.slowest,
            device_pairs=dict(counts.pairs),
            seconds=self._seconds,
            peak_extra_bytes=self._extra,
            copied_bytes=self._copied,
            control_bytes=counts.control,
        )

    def _take_memory(self, into: Mapping[str, torch.Tensor] | None, device: torch.device) -> None:
        wanted = self._schedule.wanted
        if into is not None:
            self._shards = {name: shard_of(into, name, shape, "to fill") for name, (shape, _) in wanted.items()}
            return
        same = {piece.dst: self._source(piece) for piece in self._schedule.copies if self._is_all(piece)}
        fresh, nbytes = shards({name: shape for name, shape in wanted.items() if name not in same}, device, self._idle)
        self._extra += nbytes
        self._shards = {name: same[name] if name in same else fresh[name] for name in wanted}

    def _is_all(self, piece: Piece) -> bool:
        """Whether a generation shard is a training shard, just as it is."""
        shape, dtype = self._schedule.wanted[piece.dst]
        source = self._source(piece)
        return tuple(source.shape) == shape and source.dtype == torch_dtype(dtype) and source.is_contiguous()

    def _slot_nbytes(self, rounds: Iterable[tuple[Sequence[Message], Sequence[Message]]]) -> int:
        """Return the most memory that one of these rounds takes: for messages that do not leave or arrive where they
        lie."""
        most = 0
        for sends, receives in rounds:
            packed = {m.contents: m.nbytes for m in sends if self._leaving(m) is None}
            staged = [m.nbytes for m in receives if self._landing(m) is None]
            most = max(most, sum(map(aligned, (*packed.values(), *staged))))
        return most

    def _post_in_place(self, messages: Sequence[Message], place: Callable[[Message], torch.Tensor | None]) -> _Posted:
        """Start sending or receiving those messages that need no slot, because they leave or land at their place."""
        if not self._wire.any_time:
            return _Posted(self._wire.post([]), messages)
        found = [(message, place(message)) for message in messages]
        begin = time.perf_counter()
        pending = self._wire.post([Parcel(m.src, m.dst, data, m.number) for m, data in found if data is not None])
        self._seconds["wire"] += time.perf_counter() - begin  # what fits into the sockets is sent here
        return _Posted(pending, [message for message, data in found if data is None])

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], slot: Slot
    ) -> tuple[Pending, list[tuple[Message, torch.Tensor]]]:
        slot.clear()
        with self._phase("cut"):
            data: dict[tuple[tuple[str, Box], ...], torch.Tensor] = {}
            for message in sends:  # what several ranks lack is cut once
                if message.contents not in data:
                    data[message.contents] = self._cut(message, slot)
            parcels = [Parcel(m.src, m.dst, data[m.contents], m.number) for m in sends]
            arriving = [(m, self._room(m, slot)) for m in receives]
            parcels += [Parcel(m.src, m.dst, data, m.number) for m, data in arriving]
        begin = time.perf_counter()
        pending = self._wire.post(parcels)
        self._seconds["wire"] += time.perf_counter() - begin
        return pending, arriving

    def _finish(self, pending: Pending, arriving: list[tuple[Message, torch.Tensor]]) -> None:
        with self._phase("wire", waits=True):
            self._wire.wait(pending)
        with self._phase("place"):
            for message, data in arriving:
                if self._landing(message) is None:
                    self._place(message, data)

    def _place(self, message: Message, data: torch.Tensor) -> None:
        for piece, part in parts_of(message.pieces, data):
            self._target(piece).copy_(part)

    def _cut(self, message: Message, slot: Slot) -> torch.Tensor:
        """Return a message's bytes: where they lie, or cut and cast into the slot."""
        flat = self._leaving(message)
        if flat is not None:
            return flat
        data = slot.take(message.nbytes)
        for piece, part in parts_of(message.pieces, data):
            part.copy_(self._source(piece))
        return data

    def _room(self, message: Message, slot: Slot) -> torch.Tensor:
        flat = self._landing(message)
        return slot.take(message.nbytes) if flat is None else flat

    def _leaving(self, message: Message) -> torch.Tensor | None:
        """Return what can be sent where it lies: in the holder's shard, or cast in its generation shard already."""
        if message.contents not in self._leaves:
            piece, *others = message.pieces
            places = () if others else (self._source(piece), *self._placed_parts(piece))
            found = (flat for place in places if (flat := _flat(place, piece.dtype)) is not None)
            self._leaves[message.contents] = next(found, None)
        return self._leaves[message.contents]

    def _placed_parts(self, piece: Piece) -> Iterator[torch.Tensor]:
        for box, target in self._placed.get(piece.src, ()):
            if intersect(box, piece.src_box) == piece.src_box:
                yield target[slices(shift(piece.src_box, [low for low, _ in box]))]

    def _landing(self, message: Message) -> torch.Tensor | None:
        """Return where a message can arrive at its place."""
        piece = message.pieces[0]
        to = (piece.dst, piece.dst_box)
        if to not in self._lands:
            self._lands[to] = _flat(self._target(piece), piece.dtype) if len(message.pieces) == 1 else None
        return self._lands[to]

    def _source(self, piece: Piece) -> torch.Tensor:
        shape = tuple(high for _, high in piece.src_box)
        return shard_of(self._held, piece.src, shape, "held")[slices(piece.src_box)]

    def _target(self, piece: Piece) -> torch.Tensor:
        return self._shards[piece.dst][slices(piece.dst_box)].view(piece.shape)

    @contextmanager
    def _phase(self, name: str, *, waits: bool = False) -> Iterator[None]:
        self._watch.enter(name, waits=waits)
        begin = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - begin


def _laid(gather: Gather, place: int, data: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield what the member at ``place`` brings, each piece as this rank sees it, and its part of ``data``."""
    return parts_of([column.others.get(place, column.own) for column in gather.columns], data)


def parts_of(pieces: Iterable[Piece], data: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield pieces, and the part of ``data`` that each is."""
    start = 0
    for piece in pieces:
        part = data[start : start + piece.nbytes]
        yield piece, part.view(torch_dtype(piece.dtype)).view(piece.shape)
        start += piece.nbytes


def _flat(tensor: torch.Tensor, dtype: str) -> torch.Tensor | None:
    """Return a tensor's own bytes, when they are in order and of the dtype that travels."""
    if tensor.dtype != torch_dtype(dtype) or not tensor.is_contiguous():
        return None
    return tensor.view(-1).view(torch.uint8)


def shard_of(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], what: str) -> torch.Tensor:
    """Return a shard that is ``what`` ("held"). Raises MismatchError when it is not there, or less than ``shape``."""
    if name not in tensors:
        raise MismatchError(f"{name}, a part of which the layout has here, is not among the shards {what}")
    tensor = tensors[name]
    if tensor.dim() != len(shape) or any(n < least for n, least in zip(tensor.shape, shape, strict=True)):
        raise MismatchError(f"shard {name} {what} is {tuple(tensor.shape)}, less than the {shape} of the layout")
    return tensor.detach()
