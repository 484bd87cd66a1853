"""Who sends what to whom in which message: a plan as one rank carries it out. Arithmetic only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlctl.keys.dtypes import DTYPE_BITS
from rlctl.sync.boxes import Box, narrow, sizes
from rlctl.sync.plan import Plan, Transfer

# A slice of at least so many bytes is a message of its own: it can leave and arrive where it lies.
APART_NBYTES = 64 << 10


class Piece(NamedTuple):
    """A slice, or a part of one: where it lies in the holder's shard, where it goes in the other's.

    Attributes:
        shape, dtype, nbytes: of the piece, as it travels.
    """

    src: str
    src_box: Box
    dst: str
    dst_box: Box
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Message(NamedTuple):
    """Pieces that travel together; elements of the widest dtype come first, so each lies at a multiple of its size."""

    src: int
    dst: int
    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass
class Schedule:
    """One rank's part of a plan.

    Attributes:
        copies: what its own device holds.
        sends, receives: by the other rank, messages in order.
        wanted: its generation shards: name -> (shape, dtype), as far as slices go into them.
    """

    copies: list[Piece] = field(default_factory=list)
    sends: dict[int, list[Message]] = field(default_factory=dict)
    receives: dict[int, list[Message]] = field(default_factory=dict)
    wanted: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """Messages of the busiest pair."""
        return max(map(len, (*self.sends.values(), *self.receives.values())), default=0)

    def round(self, number: int) -> tuple[list[Message], list[Message]]:
        """Return what is sent and what is received in a round: at most one message to and from each rank."""
        return _nth(self.sends, number), _nth(self.receives, number)


def _nth(by_rank: dict[int, list[Message]], number: int) -> list[Message]:
    return [messages[number] for messages in by_rank.values() if number < len(messages)]


def group_ranks(plan: Plan) -> dict[int, int]:
    """Return device -> rank of the group: the devices of both layouts in order."""
    devices = sorted({*plan.placement.train, *plan.placement.rollout})
    return {device: rank for rank, device in enumerate(devices)}


def most_peers(plan: Plan) -> int:
    """Return the largest number of messages that a rank sends and gets at once."""
    ranks, loads = group_ranks(plan), defaultdict[int, int](int)
    for src, dst, link in plan.traffic.pairs:
        if link != "device":
            loads[ranks[plan.placement.train[src]]] += 1
            loads[ranks[plan.placement.rollout[dst]]] += 1
    return max(loads.values(), default=1)


def schedule(plan: Plan, rank: int, *, message_nbytes: int, names: Collection[str] | None = None) -> Schedule:
    """Return what ``rank`` of the group does.

    Args:
        plan: the same on every rank.
        rank: its place among the devices of the plan.
        message_nbytes: most bytes of one message, the same on every rank.
        names: only these weights.
    """
    ranks, dtypes = group_ranks(plan), {weight.name: weight.dtype for weight in plan.weights}
    here = next(device for device, found in ranks.items() if found == rank)
    train = plan.placement.train.index(here) if here in plan.placement.train else -1
    rollout = plan.placement.rollout.index(here) if here in plan.placement.rollout else -1
    found = Schedule()
    sends, receives = defaultdict[int, list[Piece]](list), defaultdict[int, list[Piece]](list)
    for transfer in plan.transfers():
        if (transfer.src != train and transfer.dst != rollout) or (names is not None and transfer.tensor not in names):
            continue
        piece = _piece(transfer, dtypes[transfer.tensor])
        if transfer.dst == rollout:
            _grow(found.wanted, piece)
        if transfer.link == "device":
            if transfer.dst == rollout:
                found.copies.append(piece)
        elif transfer.src == train:
            sends[ranks[plan.placement.rollout[transfer.dst]]] += cut(piece, message_nbytes)
        else:
            receives[ranks[plan.placement.train[transfer.src]]] += cut(piece, message_nbytes)
    found.sends = {to: list(messages(rank, to, pieces, message_nbytes)) for to, pieces in sends.items()}
    found.receives = {of: list(messages(of, rank, pieces, message_nbytes)) for of, pieces in receives.items()}
    return found


def cut(piece: Piece, most: int) -> Iterator[Piece]:
    """Yield a piece in parts of at most ``most`` bytes, cut along its outermost dimension that has a length."""
    dim = next((d for d, n in enumerate(piece.shape) if n > 1), None)
    if piece.nbytes <= most or dim is None:
        yield piece
        return
    length = piece.shape[dim]
    per_row = piece.nbytes // length
    step = max(most // per_row, 1)
    for low in range(0, length, step):
        high = min(low + step, length)
        part = piece._replace(
            src_box=_part(piece.src_box, len(piece.shape), dim, low, high),
            dst_box=_part(piece.dst_box, len(piece.shape), dim, low, high),
            shape=(*piece.shape[:dim], high - low, *piece.shape[dim + 1 :]),
            nbytes=per_row * (high - low),
        )
        yield from cut(part, most)


def messages(src: int, dst: int, pieces: Iterable[Piece], most: int) -> Iterator[Message]:
    """Yield pieces as messages of at most ``most`` bytes, a large piece alone."""
    pending: list[Piece] = []
    for piece in pieces:
        if piece.nbytes >= APART_NBYTES:
            yield _message(src, dst, [piece])
            continue
        if pending and sum(p.nbytes for p in pending) + piece.nbytes > most:
            yield _message(src, dst, pending)
            pending = []
        pending.append(piece)
    if pending:
        yield _message(src, dst, pending)


def _message(src: int, dst: int, pieces: Sequence[Piece]) -> Message:
    ordered = sorted(pieces, key=lambda piece: -DTYPE_BITS[piece.dtype])
    return Message(src, dst, tuple(ordered), sum(piece.nbytes for piece in pieces))


def _piece(transfer: Transfer, dtype: str) -> Piece:
    shape = sizes(transfer.box)
    return Piece(
        transfer.src_tensor, transfer.src_box, transfer.dst_tensor, transfer.dst_box, shape, dtype, transfer.nbytes
    )


def _part(box: Box, dims: int, dim: int, low: int, high: int) -> Box:
    # A fused tensor may have one dimension more in front, the expert.
    at = dim + len(box) - dims
    return narrow(box, at, box[at][0] + low, box[at][0] + high)


def _grow(wanted: dict[str, tuple[tuple[int, ...], str]], piece: Piece) -> None:
    shape = tuple(high for _, high in piece.dst_box)
    before, _ = wanted.get(piece.dst, (shape, piece.dtype))
    wanted[piece.dst] = (tuple(map(max, shape, before)), piece.dtype)
