"""The arithmetic of cutting: heads, rows, vocabularies and experts dealt out to ranks."""

from __future__ import annotations

from rlctl.errors import UsageError
from rlctl.sync.boxes import Box, narrow
from rlctl.sync.weights import Split


def split_box(box: Box, split: Split, index: int, width: int, vocab_multiple: int, name: str) -> Box:
    """Return what tensor-parallel rank ``index`` of ``width`` holds of ``box``.

    Raises UsageError when heads or rows cannot be dealt out evenly.
    """
    if width == 1 or split.kind == "whole":
        return box
    low, high = box[split.dim]
    size, units = high - low, split.units
    if split.kind == "vocab":
        step = -(-(-(-size // vocab_multiple) * vocab_multiple) // width)
        return narrow(box, split.dim, min(low + index * step, high), min(low + (index + 1) * step, high))
    if split.kind == "kv" and width > units:
        if width % units:
            raise UsageError(f"tensor parallelism {width} is not a multiple of the {units} key-value heads of {name}")
        index, width = index * units // width, units
    if units % width:
        raise UsageError(
            f"tensor parallelism {width} does not divide the {units} parts of {name}",
            fix="heads and feed-forward width must be multiples of it",
        )
    step = size // width
    return narrow(box, split.dim, low + index * step, low + (index + 1) * step)


def even_parts(count: int, parts: int) -> tuple[int, ...]:
    """Return ``count`` dealt out to ``parts`` as evenly as can be, the first ones larger."""
    return tuple(count // parts + (i < count % parts) for i in range(parts))


def even_range(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return the range of items that part ``index`` gets by ``even_parts``."""
    small, more = divmod(count, parts)
    start = index * small + min(index, more)
    return start, start + small + (index < more)


def even_place(count: int, parts: int, item: int) -> tuple[int, int, int]:
    """Return (part, place in the part, size of the part) of an item dealt out by ``even_parts``."""
    small, more = divmod(count, parts)
    edge = more * (small + 1)
    part = item // (small + 1) if item < edge else more + (item - edge) // small
    start, end = even_range(count, parts, part)
    return part, item - start, end - start


def shard_of(place: int, size: int, count: int) -> int:
    """Return which of ``count`` FSDP shards of ``size`` rows holds row ``place``."""
    return place // -(-size // count)
