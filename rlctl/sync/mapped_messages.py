"""What is said about weights that receivers read where they lie, in the sender's arena.

A sync goes as extents: stretches of one segment, with the digests of the tensors in them. The table of what lies in
them is told to a receiver when it joins and, from the first difference on, when it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from rlctl.sync.errors import CorruptedError
from rlctl.sync.tensor_meta import Size, SyncSummary, TensorMeta

T = TypeVar("T")


class NewSegment(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The file of a segment comes next; those of ``gone`` are not used any more."""

    serial: Size
    nbytes: Size
    gone: list[Size]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor and its offset in its extent."""

    tensor: TensorMeta
    offset: Size


class Table(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Entries from number ``first`` on; what the receiver knew from there on holds no more."""

    first: Size
    entries: list[Entry]


class Extent(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Bytes ``[start, start + used)`` of a segment's tensors: ``count`` entries of the table from ``first`` on.

    ``writes``: what the segment's counter says as long as nothing else is written there.
    """

    serial: Size
    start: Size
    used: Size
    writes: Size
    first: Size
    count: Size
    index: Size
    version: int
    digests: list[bytes]
    summary: SyncSummary | None


class Through(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A receiver has what sync ``number`` brought; if it ``keeps`` it where it lies, it says Released later."""

    number: Size
    keeps: bool


class Released(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A receiver does not use the memory of sync ``number`` any more."""

    number: Size


Told = NewSegment | Table | Extent
Answer = Through | Released
encode = msgspec.msgpack.Encoder().encode
_TOLD: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def told(message: bytes, peer: str) -> Told:
    """Return what a sender says. Raises CorruptedError."""
    return _decoded(_TOLD.decode, message, peer)


def answer(message: bytes, peer: str) -> Answer:
    """Return what a receiver says. Raises CorruptedError."""
    return _decoded(_ANSWER.decode, message, peer)


def _decoded(decode: Callable[[bytes], T], message: bytes, peer: str) -> T:
    try:
        return decode(message)
    except msgspec.DecodeError as error:
        raise CorruptedError(f"a message from {peer} cannot be read: {error}") from error
