"""Coding what changed between two versions of a tensor, on arrays of bytes.

Changed elements are found bytewise (NaN payloads and -0.0 count), their positions coded as gaps of one or two bytes,
their new values either as they are or as steps from the old ones: most elements of a bf16 copy move by one unit in the
last place when the optimizer's step is small. Each part is compressed when that makes it smaller.
"""

from __future__ import annotations

import struct
import sys
from math import prod
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from rlctl.keys.dtypes import DTYPE_BITS, FLOAT_DTYPES
from rlctl.sync.digest import Bytes, FullHasher
from rlctl.sync.errors import CorruptedError
from rlctl.sync.tensor_meta import Size

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# Two versions of a block, and the comparison, stay in the second-level cache.
BLOCK_NBYTES = 512 << 10
# Above this share of changed elements coding costs more time than the bytes it saves.
DENSE_ABOVE = 0.3
# One-byte gaps while a jump beyond them is rare.
WIDE_GAPS_BELOW = 1 / 300
_LEVEL = 1
_ESCAPE = -128
_HEAD = struct.Struct("<I")
Array = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]


class Section(msgspec.Struct, frozen=True, array_like=True):
    """One part of a coded delta: bytes as stored, bytes when decompressed (equal when stored plain)."""

    stored: Size
    plain: Size


class DeltaHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a coded delta is about.

    ``base`` and ``result`` are content digests of the tensor before and after. ``kind`` says what follows the gaps:
    new values, or one-byte steps and then the values of elements that a step could not reach.
    """

    dtype: str
    shape: tuple[Size, ...]
    base: bytes
    result: bytes
    changed: Size
    gap_nbytes: Literal[1, 2]
    kind: Literal["values", "steps"]
    sections: tuple[Section, ...]


_DECODER = msgspec.msgpack.Decoder(DeltaHeader)


class Change:
    """The elements that differ.

    Attributes:
        positions: their indices, ascending.
        old, new: their bits before and after, unsigned.
        digest: content digest of the new tensor.
        elements: of the whole tensor.
    """

    def __init__(self, positions: Positions, old: Array, new: Array, digest: bytes, elements: int) -> None:
        self.positions = positions
        self.old = old
        self.new = new
        self.digest = digest
        self.elements = elements

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self.positions.size / max(self.elements, 1)


def element_nbytes(dtype: str) -> int:
    """Return the bytes that are compared as one: an element, or one byte of packed types."""
    return max(DTYPE_BITS[dtype] // 8, 1)


def find_changes(old: Bytes, new: Bytes, dtype: str) -> Change:
    """Compare two versions of a tensor, given as contiguous bytes, and hash the new one on the way."""
    change = few_changes(old, new, dtype, 1.0)
    assert change is not None
    return change


def few_changes(old: Bytes, new: Bytes, dtype: str, at_most: float) -> Change | None:
    """The same, unless more than the share ``at_most`` of the elements changed: None, as soon as that is certain."""
    kind = np.dtype(f"u{element_nbytes(dtype)}")
    before, after = old.view(kind), new.view(kind)
    hashing = FullHasher()
    step = BLOCK_NBYTES // kind.itemsize
    mask = np.empty(step, dtype=bool)
    found: list[tuple[Positions, Array, Array]] = []
    most = at_most * after.size
    for begin in range(0, after.size, step):
        a, b = before[begin : begin + step], after[begin : begin + step]
        hashing.update(b.view(np.uint8))
        differ = np.not_equal(a, b, out=mask[: b.size])
        where = np.flatnonzero(differ)
        most -= where.size
        if most < 0:
            return None
        if where.size:
            found.append((where + begin, a[where], b[where]))
    if not found:
        found.append((np.empty(0, np.int64), np.empty(0, kind), np.empty(0, kind)))
    positions, was, now = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Change(positions, was, now, hashing.content(), after.size)


def encode(change: Change, dtype: str, shape: tuple[int, ...], base: bytes) -> Bytes:
    """Return a delta as one array of bytes: header length, header, sections."""
    wide = change.density < WIDE_GAPS_BELOW
    parts = [_encode_gaps(change.positions, 2 if wide else 1)]
    steps, escaped = _steps(change, dtype)
    kind: Literal["values", "steps"] = "values"
    if steps is not None and steps.size + escaped.nbytes < change.new.nbytes:
        kind = "steps"
        parts += [steps, escaped]
    else:
        parts.append(change.new)
    stored, sections = [], []
    for part in parts:
        plain = part.view(np.uint8)
        packed = zstd.compress(plain.data, _LEVEL)
        smaller = len(packed) < plain.nbytes
        stored.append(np.frombuffer(packed, np.uint8) if smaller else plain)
        sections.append(Section(stored[-1].nbytes, plain.nbytes))
    header = msgspec.msgpack.encode(
        DeltaHeader(dtype, shape, base, change.digest, change.positions.size, 2 if wide else 1, kind, tuple(sections))
    )
    head = np.frombuffer(_HEAD.pack(len(header)) + header, np.uint8)
    return np.concatenate([head, *stored])


def read_header(payload: Bytes) -> DeltaHeader:
    """Return the header of a coded delta. Raises CorruptedError."""
    if payload.nbytes < _HEAD.size:
        raise CorruptedError(f"a delta of {payload.nbytes} bytes")
    (length,) = _HEAD.unpack_from(payload.data)
    try:
        header = _DECODER.decode(payload[_HEAD.size : _HEAD.size + length].data)
    except msgspec.DecodeError as error:
        raise CorruptedError(f"the header of a delta cannot be read: {error}") from error
    expected = 2 if header.kind == "values" else 3
    total = _HEAD.size + length + sum(s.stored for s in header.sections)
    # No part is longer than eight bytes an element, whatever it decompresses to.
    longest = 8 * prod(header.shape) + 8
    if (
        header.dtype not in DTYPE_BITS
        or len(header.sections) != expected
        or total != payload.nbytes
        or any(s.plain > longest for s in header.sections)
    ):
        raise CorruptedError("the header of a delta and its bytes do not fit each other")
    return header


def apply(payload: Bytes, base: Bytes) -> DeltaHeader:
    """Change ``base``, a tensor's contiguous bytes, in place into what the delta was made from.

    The caller compares ``base`` with the header's digest before, and the result after. Raises CorruptedError.
    """
    header = read_header(payload)
    target = base.view(f"u{element_nbytes(header.dtype)}")
    gaps, *rest = _sections(payload, header)
    positions = _decode_gaps(gaps.view(f"u{header.gap_nbytes}"))
    if positions.size != header.changed or (positions.size and int(positions[-1]) >= target.size):
        raise CorruptedError(f"a delta of {header.changed} changes has positions for {positions.size}, or outside")
    values = rest[0].view(target.dtype) if header.kind == "values" else _take_steps(header, target, positions, rest)
    if values.size != positions.size:
        raise CorruptedError(f"a delta of {header.changed} changes has {values.size} values")
    target[positions] = values
    return header


def _encode_gaps(positions: Positions, nbytes: int) -> Array:
    kind = np.dtype(f"u{nbytes}")
    skip = int(np.iinfo(kind).max)
    gaps = np.diff(positions, prepend=-1) - 1
    jumps = gaps // skip  # each one is an element ``skip`` that stands for so many unchanged ones
    total = int(jumps.sum())
    if not total:
        return gaps.astype(kind)
    coded = np.full(gaps.size + total, skip, dtype=kind)
    coded[np.cumsum(jumps) + np.arange(gaps.size)] = gaps % skip
    return coded


def _decode_gaps(coded: Array) -> Positions:
    skip = int(np.iinfo(coded.dtype).max)
    ends = coded != skip
    moves = coded.astype(np.int64)
    moves += ends
    positions = np.cumsum(moves, out=moves)
    positions -= 1
    return positions if ends.all() else positions[ends]


def _ordered(bits: Array, dtype: str) -> Array:
    """Map bits to signed integers so that neighbouring numbers are neighbours; its own inverse."""
    signed: Array = bits.view(f"i{bits.itemsize}")
    if dtype not in FLOAT_DTYPES:
        return signed
    top = np.iinfo(signed.dtype).max
    mapped: Array = signed ^ ((signed >> (8 * bits.itemsize - 1)) & signed.dtype.type(top))
    return mapped


def _steps(change: Change, dtype: str) -> tuple[Array | None, Array]:
    """Return one-byte steps, and the new bits of the elements that need more; None for one-byte elements."""
    if change.new.itemsize == 1:
        return None, change.new
    moved = _ordered(change.new, dtype) - _ordered(change.old, dtype)  # wraps, and wraps back on the other side
    far = (moved > 127) | (moved < -127)
    steps = moved.astype(np.int8)
    steps[far] = _ESCAPE
    return steps, change.new[far]


def _take_steps(header: DeltaHeader, target: Array, positions: Positions, parts: list[Bytes]) -> Array:
    steps, escaped = parts[0].view(np.int8), parts[1].view(target.dtype)
    far = steps == _ESCAPE
    if steps.size != positions.size or np.count_nonzero(far) != escaped.size:
        raise CorruptedError(f"a delta of {header.changed} changes has {steps.size} steps")
    moved = _ordered(target[positions], header.dtype)
    moved = moved + steps.astype(moved.dtype)
    values = _ordered(moved.view(target.dtype), header.dtype).view(target.dtype)
    values[far] = escaped
    return values


def _sections(payload: Bytes, header: DeltaHeader) -> list[Bytes]:
    begin = payload.nbytes - sum(s.stored for s in header.sections)
    found = []
    for section in header.sections:
        part = payload[begin : begin + section.stored]
        begin += section.stored
        found.append(part if section.stored == section.plain else _decompress(part, section.plain))
    return found


def _decompress(part: Bytes, plain: int) -> Bytes:
    try:
        data = zstd.ZstdDecompressor().decompress(part.data, max_length=plain)
    except zstd.ZstdError as error:
        raise CorruptedError(f"a part of a delta cannot be decompressed: {error}") from error
    if len(data) != plain:
        raise CorruptedError(f"a part of a delta has {len(data)} bytes, announced were {plain}")
    return np.frombuffer(data, np.uint8)
