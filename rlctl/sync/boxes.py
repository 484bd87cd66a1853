"""Boxes: the part of a tensor between two corners, ``((low, high), ...)`` per dimension, high excluded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """Return the box of all of a tensor."""
    return tuple((0, n) for n in shape)


def volume(box: Box) -> int:
    """Return the number of elements; 1 for the box of a scalar."""
    return prod(high - low for low, high in box)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the shape of the part."""
    return tuple(high - low for low, high in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common part, or None when there is none."""
    found = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return found if all(low < high for low, high in found) else None


def narrow(box: Box, dim: int, low: int, high: int) -> Box:
    """Return ``box`` with dimension ``dim`` replaced."""
    return (*box[:dim], (low, high), *box[dim + 1 :])


def shift(box: Box, origin: Sequence[int]) -> Box:
    """Return ``box`` as seen from ``origin``."""
    return tuple((low - o, high - o) for (low, high), o in zip(box, origin, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """Return what indexes a tensor or an array with the part."""
    return tuple(slice(low, high) for low, high in box)


def is_flat(box: Box, shape: Sequence[int]) -> bool:
    """Whether the part is one run of bytes of a contiguous tensor of ``shape``, so that one descriptor moves it."""
    partial = False
    for (low, high), n in zip(box, shape, strict=True):
        if partial and high - low != n:
            return False
        partial = partial or high - low != 1
    return True


def disjoint_cells(boxes: Sequence[Box]) -> list[tuple[Box, tuple[int, ...]]]:
    """Cut the union of ``boxes`` into disjoint cells and return each with the indices of the boxes that hold it.

    Boxes that are equal or disjoint already (every regular sharding) stay as they are.
    """
    owners: dict[Box, list[int]] = {}
    for index, box in enumerate(boxes):
        if volume(box):
            owners.setdefault(box, []).append(index)
    unique = sorted(owners)
    if _are_disjoint(unique):
        return [(box, tuple(owners[box])) for box in unique]
    cells = []
    for cell in _grid(unique):
        found = [i for box in unique if intersect(cell, box) for i in owners[box]]
        if found:
            cells.append((cell, tuple(sorted(found))))
    return cells


def _are_disjoint(ordered: Sequence[Box]) -> bool:
    """Whether no two of the boxes, sorted, share an element. Linear when they differ in one dimension."""
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break  # sorted by the first dimension: nothing further can meet it
            if intersect(box, other) is not None or not box:
                return False
    return True


def _grid(boxes: Sequence[Box]) -> Iterator[Box]:
    cuts = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(boxes[0]))]
    yield from product(*(pairwise(c) for c in cuts))
