"""What a naming scheme stores: each stored tensor as regions of the model's canonical tensors.

Canonical tensors are those of the per-expert Hugging Face form, under their Hugging Face names: ``q_proj``, ``k_proj``
and ``v_proj`` apart, ``gate_proj`` and ``up_proj`` apart, experts apart, nothing padded, nothing sharded. Every scheme
says how its own tensors are made of these. A conversion from any scheme to any other is then the intersection of two
such descriptions, which ``rlctl.keys.compose`` computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from rlctl.keys.boxes import Box, Shape, Span, extent, fits, whole

NEW = -1  # a stored dimension that the canonical tensor lacks, such as the expert index of a stack


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """Names one stored tensor: its name and, where ranks keep files of their own, the rank's file or folder."""

    name: str
    shard: str = ""

    def __str__(self) -> str:
        return f"{self.shard}:{self.name}" if self.shard else self.name


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and element type (a safetensors code such as ``BF16``) of a stored tensor."""

    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Part:
    """One region of a canonical tensor and the region of the stored tensor where it lies.

    Args:
        tensor: the canonical name.
        box: the region of the canonical tensor, with steps of 1.
        at: the region of the stored tensor; a step above 1 tells of interleaving.
        axes: for each stored dimension the canonical dimension that it is, or ``NEW``.
    """

    tensor: str
    box: Box
    at: Box
    axes: tuple[int, ...]

    def narrowed(self, inner: Box) -> Box:
        """Return where ``inner``, a region inside ``self.box``, lies in the stored tensor."""
        spans = []
        for span, axis in zip(self.at, self.axes, strict=True):
            if axis == NEW:
                spans.append(span)
            else:
                skipped = inner[axis].start - self.box[axis].start
                spans.append(Span(span.start + skipped * span.step, inner[axis].size, span.step))
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a scheme stores it.

    Args:
        ref: its name and rank file.
        shape: its whole shape, padding included.
        parts: what fills it; what no part covers is padding, written as zeros and not read.
        optional: a source may lack it.
        written: a target holds it; an alias such as a tied head is read when present but never written.
        note: why it is an alias or a copy, for the report.
    """

    ref: Ref
    shape: Shape
    parts: tuple[Part, ...]
    optional: bool = False
    written: bool = True
    note: str = ""


@dataclass(frozen=True)
class Drop:
    """Stored names that hold nothing of the model's weights and are left out, with the reason."""

    pattern: re.Pattern[str]
    reason: str


@dataclass(frozen=True)
class Layout:
    """All that one scheme stores of one model."""

    scheme: str
    stored: Mapping[Ref, Stored]
    drops: Sequence[Drop] = field(default=())

    def drop_reason(self, name: str) -> str | None:
        """Return why a stored name outside the layout may be left out, or None when it is unknown."""
        return next((drop.reason for drop in self.drops if drop.pattern.search(name)), None)


def layout(scheme: str, stored: Iterable[Stored], drops: Sequence[Drop] = ()) -> Layout:
    """Return the layout of ``stored``; no two of them may have one name."""
    table: dict[Ref, Stored] = {}
    for one in stored:
        assert one.ref not in table, f"{scheme} names {one.ref} twice"
        assert all(fits(part.at, one.shape) for part in one.parts), (
            f"{one.ref} of {scheme} has a part outside {one.shape}"
        )
        table[one.ref] = one
    return Layout(scheme, table, drops)


def alone(ref: Ref, tensor: str, shape: Shape) -> Stored:
    """Return a stored tensor that is one canonical tensor, whole."""
    return Stored(ref, shape, (whole_part(tensor, shape),))


def whole_part(tensor: str, shape: Shape) -> Part:
    """Return a part that is a canonical tensor in its own shape, at the origin."""
    box = whole(shape)
    return Part(tensor, box, box, tuple(range(len(shape))))


def placed(tensor: str, box: Box, start: Sequence[int]) -> Part:
    """Return a part that keeps the shape of ``box`` and lies at ``start`` in the stored tensor."""
    at = _moved(box, tuple(start))
    return Part(tensor, box, at, tuple(range(len(box))))


@lru_cache(maxsize=1 << 14)
def _moved(box: Box, start: tuple[int, ...]) -> Box:
    return tuple(Span(first, count) for first, count in zip(start, extent(box), strict=True))


@lru_cache(maxsize=1 << 14)
def rows(shape: Shape, start: int, count: int) -> Box:
    """Return ``count`` rows (dimension 0) of a tensor of ``shape``."""
    return (Span(start, count), *whole(shape)[1:])


@lru_cache(maxsize=1 << 14)
def columns(shape: Shape, start: int, count: int) -> Box:
    """Return ``count`` columns (dimension 1) of a tensor of ``shape``."""
    return (Span(0, shape[0]), Span(start, count), *whole(shape)[2:])
