"""What travels: slices, cut into messages of a bounded size. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rlctl.keys.dtypes import DTYPE_BITS
from rlctl.sync.boxes import Box, narrow, sizes
from rlctl.sync.plan import Transfer

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
    """Pieces that travel together; elements of the widest dtype come first, so each lies at a multiple of its size.

    Attributes:
        contents: what it is of the holder's shards.
        number: its place among the messages of the two ranks.
    """

    src: int
    dst: int
    pieces: tuple[Piece, ...]
    nbytes: int
    contents: tuple[tuple[str, Box], ...]
    number: int


def piece_of(transfer: Transfer, dtype: str) -> Piece:
    """Return a transfer's slice, which travels as ``dtype``."""
    shape = sizes(transfer.box)
    return Piece(
        transfer.src_tensor, transfer.src_box, transfer.dst_tensor, transfer.dst_box, shape, dtype, transfer.nbytes
    )


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
    for number, together in enumerate(_together(pieces, most)):
        ordered = sorted(together, key=lambda piece: -DTYPE_BITS[piece.dtype])
        contents = tuple((piece.src, piece.src_box) for piece in ordered)
        yield Message(src, dst, tuple(ordered), sum(piece.nbytes for piece in together), contents, number)


def in_rounds(found: Iterable[Message], most: int) -> Iterator[tuple[Message, ...]]:
    """Yield the messages that two ranks exchange in a round, in order: at most ``most`` bytes, or a single one."""
    pending: list[Message] = []
    for message in found:
        if pending and sum(m.nbytes for m in pending) + message.nbytes > most:
            yield tuple(pending)
            pending = []
        pending.append(message)
    if pending:
        yield tuple(pending)


def _together(pieces: Iterable[Piece], most: int) -> Iterator[Sequence[Piece]]:
    pending: list[Piece] = []
    for piece in pieces:
        if piece.nbytes >= APART_NBYTES:
            yield [piece]
            continue
        if pending and sum(p.nbytes for p in pending) + piece.nbytes > most:
            yield pending
            pending = []
        pending.append(piece)
    if pending:
        yield pending


def _part(box: Box, dims: int, dim: int, low: int, high: int) -> Box:
    # A fused tensor may have one dimension more in front, the expert.
    at = dim + len(box) - dims
    return narrow(box, at, box[at][0] + low, box[at][0] + high)
