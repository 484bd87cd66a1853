"""Carrying out a plan in place: every rank of a process group makes the same calls, and only missing slices travel."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rlctl.errors import UsageError
from rlctl.hybrid.reshard.memory import Slot, shards
from rlctl.hybrid.reshard.micro_groups import Gather, group_ranks
from rlctl.hybrid.reshard.pieces import APART_NBYTES, Message, Piece
from rlctl.hybrid.reshard.report import PHASES, Switched, SwitchReport
from rlctl.hybrid.reshard.schedule import Schedule, most_peers, schedule
from rlctl.hybrid.reshard.watch import Watch
from rlctl.hybrid.reshard.wire import Counts, Parcel, Pending, Wire
from rlctl.keys.dtypes import torch_dtype
from rlctl.sync.boxes import slices
from rlctl.sync.cutting import aligned
from rlctl.sync.errors import MismatchError
from rlctl.sync.plan import Plan

BUCKET_NBYTES = 32 << 20
# Rounds that are under way at once: one is cut or put in place while another is on the wire.
DEPTH = 2


class Resharder:
    """Switches between a training and a generation layout on the same devices.

    Args:
        plan: from the training layout to the generation layout; equal on all ranks. Weights have the dtype that the
            rollout computes in: shards are cast to it before they travel. The devices of its placement, in order, are
            the ranks of the group.
        group: the ranks; None: the default group, or this process alone when there is none.
        deadline: seconds that one wait for other ranks may take.
        delta: keep the generation shards while training, and send only what changed in them.
        names: only these weights (of a LoRA run, the adapter's).
        bucket_nbytes: memory for slices that are cut, cast or received apart from where they lie; about so much is
            taken beside the generation shards.
        gather_below: slices of fewer bytes go by collectives where micro-groups exchange alike. Default: all on NCCL;
            on the CPU only what would not leave and arrive where it lies; none in a group other than the default one,
            whose parts cannot be made into groups.
    """

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup | None,
        *,
        deadline: float,
        delta: bool = False,
        names: Collection[str] | None = None,
        bucket_nbytes: int = BUCKET_NBYTES,
        gather_below: float | None = None,
    ) -> None:
        self.plan = plan
        self._group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        size = 1 if self._group is None else dist.get_world_size(self._group)
        if len(group_ranks(plan)) != size:
            raise UsageError(f"the plan is for {len(group_ranks(plan))} devices, and the group has {size} ranks")
        if delta:
            raise UsageError("deltas are not built in yet")
        self._deadline = deadline
        self._delta = delta
        message_nbytes = max(bucket_nbytes // (DEPTH * most_peers(plan)), 1)
        if size == 1 or self._group is not dist.group.WORLD:
            gather_below = 0
        elif gather_below is None:
            gather_below = math.inf if _backend(self._group) == "nccl" else APART_NBYTES
        self._schedule = schedule(
            plan, self._rank, message_nbytes=message_nbytes, gather_below=gather_below, names=names
        )
        self._groups = _micro_groups(self._group, self._schedule.groups, size)
        self._watch = Watch(self._group, self._rank, size)
        self._shards: dict[str, torch.Tensor] | None = None
        self._version: int | None = None

    def to_rollout(
        self,
        held: Mapping[str, torch.Tensor],
        *,
        version: int | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> Switched:
        """Bring this rank what its generation shards lack.

        Args:
            held: training shards, by the names of the training layout, of any dtype, on one device.
            version: of the weights. When it is the one that the shards have already, nothing moves.
            into: generation shards to fill (an engine's own parameters); default: memory of its own, and a shard that
                is just what the trainer holds is that tensor itself.

        Raises:
            ReshardError: a rank is dead or stuck; names it and its phase.
            MismatchError: a shard is not there or not of the layout's shape.
        """
        if version is not None and version == self._version and self._shards is not None:
            return Switched(self._shards, SwitchReport())
        run = _Run(self._schedule, held, Wire(self._group, self._groups, self._watch, self._deadline), self._watch)
        self._version = None
        with self._watch.switch():
            found = run.all(into)
        self._shards, self._version = found, version
        return Switched(found, run.report(self._rank))

    def to_training(self) -> None:
        """Let go of the generation shards. Nothing moves: what is trained never left."""
        self._shards = self._version = None


def _backend(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else str(dist.get_backend(group))


def _micro_groups(
    group: dist.ProcessGroup | None, sets: Collection[tuple[int, ...]], size: int
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return a group for each set of ranks that has collectives of its own. Every rank of the default group makes all
    of them: torch has no other way that is safe where ranks have made different groups before."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for members in sorted(sets):
        assert group is not None
        found[members] = group if len(members) == size else dist.new_group(list(members), backend=_backend(group))
    return found


class _Run:
    """One switch."""

    def __init__(self, plan: Schedule, held: Mapping[str, torch.Tensor], wire: Wire, watch: Watch) -> None:
        self._schedule = plan
        self._held = {name: tensor.detach() for name, tensor in held.items()}
        self._wire = wire
        self._watch = watch
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._extra = 0
        self._staged = 0
        self._shards: dict[str, torch.Tensor] = {}

    def all(self, into: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Return the generation shards, filled."""
        device = next((tensor.device for tensor in self._held.values()), torch.device("cpu"))
        with self._phase("cut"):
            self._take_memory(into, device)
        self._gather(device)
        slots = [Slot(self._slot_nbytes(parity), device) for parity in range(min(DEPTH, self._schedule.rounds))]
        # The one for collectives is gone by now.
        self._extra += max(self._staged, sum(slot.nbytes for slot in slots))
        under_way: list[tuple[Pending, list[tuple[Message, torch.Tensor]]]] = []
        for number in range(self._schedule.rounds):
            if len(under_way) == len(slots):
                self._finish(*under_way.pop(0))
            under_way.append(self._start(number, slots[number % len(slots)]))
        with self._phase("place"):
            for piece in self._schedule.copies:
                target = self._target(piece)
                source = self._source(piece)
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)
        for started in under_way:
            self._finish(*started)
        return self._shards

    def _gather(self, device: torch.device) -> None:
        gathers = self._schedule.gathers
        if not gathers:
            return
        slot = Slot(max(len(gather.ranks) * gather.nbytes for gather in gathers), device)
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
        )

    def _take_memory(self, into: Mapping[str, torch.Tensor] | None, device: torch.device) -> None:
        wanted = self._schedule.wanted
        if into is not None:
            self._shards = {name: _found(into, name, shape, "to fill") for name, (shape, _) in wanted.items()}
            return
        same = {piece.dst: self._source(piece) for piece in self._schedule.copies if self._is_all(piece)}
        fresh, nbytes = shards({name: shape for name, shape in wanted.items() if name not in same}, device)
        self._extra += nbytes
        self._shards = {name: same[name] if name in same else fresh[name] for name in wanted}

    def _is_all(self, piece: Piece) -> bool:
        """Whether a generation shard is a training shard, just as it is."""
        shape, dtype = self._schedule.wanted[piece.dst]
        source = self._source(piece)
        return tuple(source.shape) == shape and source.dtype == torch_dtype(dtype) and source.is_contiguous()

    def _slot_nbytes(self, parity: int) -> int:
        rounds = (self._schedule.round(number) for number in range(parity, self._schedule.rounds, DEPTH))
        return max(sum(aligned(message.nbytes) for message in (*sends, *receives)) for sends, receives in rounds)

    def _start(self, number: int, slot: Slot) -> tuple[Pending, list[tuple[Message, torch.Tensor]]]:
        sends, receives = self._schedule.round(number)
        slot.clear()
        with self._phase("cut"):
            parcels = [Parcel(m.src, m.dst, self._cut(m, slot)) for m in sends]
            arriving = [(m, self._room(m, slot)) for m in receives]
            parcels += [Parcel(m.src, m.dst, data) for m, data in arriving]
        return self._wire.post(parcels), arriving

    def _finish(self, pending: Pending, arriving: list[tuple[Message, torch.Tensor]]) -> None:
        with self._phase("wire", waits=True):
            self._wire.wait(pending)
        with self._phase("place"):
            for message, data in arriving:
                for piece, part in _parts(message.pieces, data):
                    target = self._target(piece)
                    if target.data_ptr() != part.data_ptr():
                        target.copy_(part)

    def _cut(self, message: Message, slot: Slot) -> torch.Tensor:
        """Return a message's bytes: where they lie, or cut and cast into the slot."""
        if len(message.pieces) == 1:
            flat = _flat(self._source(message.pieces[0]), message.pieces[0].dtype)
            if flat is not None:
                return flat
        data = slot.take(message.nbytes)
        for piece, part in _parts(message.pieces, data):
            part.copy_(self._source(piece))
        return data

    def _room(self, message: Message, slot: Slot) -> torch.Tensor:
        if len(message.pieces) == 1:
            flat = _flat(self._target(message.pieces[0]), message.pieces[0].dtype)
            if flat is not None:
                return flat
        return slot.take(message.nbytes)

    def _source(self, piece: Piece) -> torch.Tensor:
        shape = tuple(high for _, high in piece.src_box)
        return _found(self._held, piece.src, shape, "held")[slices(piece.src_box)]

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
    return _parts([column.others.get(place, column.own) for column in gather.columns], data)


def _parts(pieces: Iterable[Piece], data: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
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


def _found(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], what: str) -> torch.Tensor:
    if name not in tensors:
        raise MismatchError(f"{name}, a part of which the layout has here, is not among the shards {what}")
    tensor = tensors[name]
    if tensor.dim() != len(shape) or any(n < least for n, least in zip(tensor.shape, shape, strict=True)):
        raise MismatchError(f"shard {name} {what} is {tuple(tensor.shape)}, less than the {shape} of the layout")
    return tensor.detach()
