"""Rectangular regions of tensors: the one shape that renames, splits, stacks and interleaves are all made of."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Span(NamedTuple):
    """``size`` indices of one dimension: ``start``, ``start + step``, ..."""

    start: int
    size: int
    step: int = 1

    @property
    def stop(self) -> int:
        """One past the last index."""
        return self.start + (self.size - 1) * self.step + 1 if self.size else self.start

    @property
    def slice(self) -> slice:
        """The same indices as a Python slice."""
        return slice(self.start, self.stop, self.step)


Box = tuple[Span, ...]


@lru_cache(maxsize=1 << 14)
def whole(shape: Shape) -> Box:
    """Return the region that is all of a tensor of ``shape``. Models have few shapes and many tensors: it is shared."""
    return tuple(Span(0, size) for size in shape)


def volume(box: Box) -> int:
    """Return the number of elements in ``box`` (1 for the region of a scalar)."""
    return prod(span.size for span in box)


def extent(box: Box) -> Shape:
    """Return the shape of the region itself."""
    return tuple(span.size for span in box)


def fits(box: Box, shape: Shape) -> bool:
    """Tell whether ``box`` lies inside a tensor of ``shape``."""
    return len(box) == len(shape) and all(
        span.start >= 0 and span.size >= 0 and span.step >= 1 and span.stop <= length
        for span, length in zip(box, shape, strict=True)
    )


def intersect(one: Box, other: Box) -> Box | None:
    """Return what two regions with steps of 1 share, or None when that is nothing.

    Empty regions meet when they are equal, so that tensors of zero elements still find their way.
    """
    assert len(one) == len(other)
    if one == other:
        return one
    shared = []
    for a, b in zip(one, other, strict=True):
        assert a.step == b.step == 1
        start, stop = max(a.start, b.start), min(a.start + a.size, b.start + b.size)
        if start >= stop:
            return None
        shared.append(Span(start, stop - start))
    return tuple(shared)


def run_length(box: Box, shape: Shape) -> int:
    """Return how many elements of ``box`` lie side by side in a row-major tensor of ``shape``, from its first one.

    Equal to ``volume(box)`` when the region is one stretch of memory.
    """
    run = 1
    for span, length in zip(reversed(box), reversed(shape), strict=True):
        if span.step != 1 and span.size > 1:
            return run
        run *= span.size
        if span.size != length:
            return run
    return run


def is_one_run(box: Box, shape: Shape) -> bool:
    """Tell whether ``box`` is one unbroken stretch of a row-major tensor of ``shape``."""
    return run_length(box, shape) == volume(box)


def first_offset(box: Box, shape: Shape) -> int:
    """Return the row-major position, in elements, of the first element of ``box``."""
    offset = 0
    for span, length in zip(box, shape, strict=True):
        offset = offset * length + span.start
    return offset
