"""The arithmetic of cutting: heads, rows, vocabularies and experts dealt out to ranks."""

from __future__ import annotations

from rlctl.errors import UsageError
from rlctl.sync.boxes import Box, narrow
from rlctl.sync.weights import Split


def split_box(
    box: Box, split: Split, index: int, width: int, vocab_multiple: int, name: str, *, padded: bool = False
) -> Box:
    """Return what tensor-parallel rank ``index`` of ``width`` holds of ``box``.

    Args:
        padded: what cannot be dealt out evenly is dealt out as evenly as can be, the first parts larger: ranks pad
            theirs to the first one's size.

    Raises UsageError when heads or rows cannot be dealt out evenly, and are not to be padded.
    """
    if width == 1 or split.kind == "whole":
        return box
    low, high = box[split.dim]
    size, units = high - low, split.units
    if split.kind == "vocab":
        step = -(-(-(-size // vocab_multiple) * vocab_multiple) // width)
        return narrow(box, split.dim, min(low + index * step, high), min(low + (index + 1) * step, high))
    if padded:
        step = size // units
        start, end = padded_range(units, split.groups or (units if split.kind == "kv" else 0), width, index)
        return narrow(box, split.dim, low + start * step, low + end * step)
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


def padded_range(units: int, groups: int, width: int, index: int) -> tuple[int, int]:
    """Return the range of units of part ``index`` of ``width``, the first part the largest.

    Args:
        groups: that stay together, ``units`` being the members of all of them; 0: there are none. With a multiple of
            ``groups`` parts several have one group, and its members are dealt out among them. (Key-value heads are
            groups of one: then they all have it.)
    """
    if not groups:
        return even_range(units, width, index)
    each = units // groups
    if width <= groups or width % groups:
        start, end = even_range(groups, width, index)
        return start * each, end * each
    copies = width // groups
    group, place = divmod(index, copies)
    start, end = even_range(each, copies, place) if each > 1 else (0, 1)
    return group * each + start, group * each + end


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
