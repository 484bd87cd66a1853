"""The explicit plan of a conversion: which region of which stored tensor becomes which region of which target.

Planning needs names, shapes and element types only, so this module and everything below it load no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl.errors import EXIT_CHECK, Finding, FindingsError
from rlctl.keys.boxes import Box, Shape, Span, volume, whole
from rlctl.keys.dtypes import dtype_nbytes
from rlctl.keys.layout import NEW, Ref, TensorInfo

SHOWN = 20  # findings that a message lists
TIED = "tied to the embedding"  # the reason of a Same that the model's configuration asks for

# Every value of the key survives the way to each of its values and back.
WIDENS = {
    "BF16": {"F32", "F64"},
    "F16": {"F32", "F64"},
    "F32": {"F64"},
    "F8_E4M3": {"BF16", "F16", "F32", "F64"},
    "F8_E5M2": {"BF16", "F16", "F32", "F64"},
}


class PlanError(FindingsError):
    """A conversion that cannot be done whole (exit 4): every reason at once."""

    exit_code = EXIT_CHECK

    def __str__(self) -> str:
        lines = [f"{self.message}", *(f"  {finding}" for finding in self.findings[:SHOWN])]
        if len(self.findings) > SHOWN:
            lines.append(f"  ... and {len(self.findings) - SHOWN} more; --json lists all")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies one region of a source into one region of a target of the same extent.

    Args:
        source: the stored tensor that is read.
        source_box: its region.
        target_box: the region of the target.
        axes: for each target dimension the source dimension that it is, or ``NEW`` for one of length 1; source
            dimensions that are not named have length 1 in ``source_box``.
    """

    source: Ref
    source_box: Box
    target_box: Box
    axes: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        """True when no dimension changes places, so that both regions hold their elements in the same order."""
        kept = [axis for axis in self.axes if axis != NEW]
        return kept == sorted(kept)

    def pieces(self, limit: int) -> Iterator[Copy]:
        """Yield copies of at most ``limit`` elements that make up this one."""
        total = volume(self.source_box)
        axis = next((i for i, span in enumerate(self.source_box) if span.size > 1), None)
        if total <= limit or axis is None:
            yield self
            return
        span = self.source_box[axis]
        place = self.axes.index(axis)
        step = max(1, limit // (total // span.size))
        for first in range(0, span.size, step):
            count = min(step, span.size - first)
            part = Copy(
                self.source,
                _shortened(self.source_box, axis, first, count),
                _shortened(self.target_box, place, first, count),
                self.axes,
            )
            yield from part.pieces(limit)

    def reversed(self, target: Ref) -> Copy:
        """Return the copy the other way, out of ``target``."""
        axes = [NEW] * len(self.source_box)
        for place, axis in enumerate(self.axes):
            if axis != NEW:
                axes[axis] = place
        return Copy(target, self.target_box, self.source_box, tuple(axes))


@dataclass(frozen=True, slots=True)
class Move:
    """One target tensor, the copies that fill it (the rest is zeros), and the names of what is done to the data."""

    target: Ref
    shape: Shape
    dtype: str
    copies: tuple[Copy, ...]
    transforms: tuple[str, ...]

    @property
    def sources(self) -> tuple[Ref, ...]:
        """The stored tensors it reads, each once, in order."""
        return tuple(dict.fromkeys(copy.source for copy in self.copies))

    @property
    def nbytes(self) -> int:
        """Bytes of the target."""
        return dtype_nbytes(self.dtype, volume(whole(self.shape)))

    @property
    def padding(self) -> int:
        """Elements that no copy fills."""
        return volume(whole(self.shape)) - sum(volume(copy.target_box) for copy in self.copies)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A stored tensor that the target does not hold, and why that is right."""

    source: Ref
    reason: str


@dataclass(frozen=True, slots=True)
class Same:
    """Two stored tensors that must hold equal bytes in ``box``; ``extra`` is then not needed."""

    kept: Ref
    extra: Ref
    box: Box
    reason: str


@dataclass(frozen=True)
class Plan:
    """A whole conversion.

    Args:
        source_scheme, target_scheme: names of the two schemes.
        sources: every stored tensor of the source with its shape and dtype.
        moves: one for each target tensor, in the order in which they are written.
        dropped: stored tensors that are left out, with reasons.
        same: equalities of the source to be checked before anything is written.
        unknown: stored tensors that nothing accounts for.
        findings: what stands in the way; a plan with findings is not executed.
        notes: what a user should know but that stands in nobody's way.
        merged: targets that LoRA deltas are added to.
    """

    source_scheme: str
    target_scheme: str
    sources: Mapping[Ref, TensorInfo]
    moves: Sequence[Move]
    dropped: Sequence[Dropped] = ()
    same: Sequence[Same] = ()
    unknown: Sequence[Ref] = ()
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    merged: int = 0
    _by_target: dict[Ref, Move] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_target.update((move.target, move) for move in self.moves)

    def move(self, target: Ref) -> Move:
        """Return the move that makes ``target``."""
        return self._by_target[target]

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors were converted (written), renamed, split, fused, merged, dropped and unknown.

        A tensor counts as renamed when only its name changes, as split when it is a piece of a stored tensor, as fused
        when it is made of several; a rank's share of a fused tensor counts as both.
        """
        tags = [set(move.transforms) for move in self.moves]
        return {
            "converted": len(self.moves),
            "renamed": sum(tag == {"rename"} for tag in tags),
            "split": sum(bool(tag & {"split", "unstack"}) for tag in tags),
            "fused": sum(len(move.sources) > 1 for move in self.moves),
            "merged": self.merged,
            "dropped": len(self.dropped),
            "unknown": len(self.unknown),
        }

    def check(self) -> None:
        """Raise PlanError when anything stands in the way."""
        if self.findings:
            raise PlanError(f"cannot convert from {self.source_scheme} to {self.target_scheme}", self.findings)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield what ``--dry-run`` prints: a target, its sources, shape, dtype and transforms."""
        for move in self.moves:
            yield {
                "target": str(move.target),
                "sources": [str(source) for source in move.sources],
                "shape": list(move.shape),
                "dtype": move.dtype,
                "transforms": list(move.transforms),
            }

    def inverse(self) -> Plan:
        """Return the plan that makes the source again, bit for bit, from the target.

        Raises PlanError that names what would be lost: dropped tensors, source elements that no target holds, casts
        to a narrower type.
        """
        losses = [*self._cast_losses(), *(Finding(f"dropped: {d.reason}", str(d.source)) for d in self._lost_drops())]
        back = self._copies_back()
        moves = []
        for ref, info in self.sources.items():
            if ref not in back:
                if not any(drop.source == ref for drop in self.dropped):
                    losses.append(Finding("no target holds it", str(ref)))
                continue
            filled = sum(volume(copy.target_box) for copy in back[ref])
            if filled < volume(whole(info.shape)):
                lost = volume(whole(info.shape)) - filled
                losses.append(Finding(f"{lost} of its elements are in no target (padding)", str(ref)))
            moves.append(Move(ref, info.shape, info.dtype, tuple(back[ref]), ("inverse",)))
        if losses:
            raise PlanError(f"{self.source_scheme} to {self.target_scheme} has no exact inverse", losses)
        infos = {move.target: TensorInfo(move.shape, move.dtype) for move in self.moves}
        return Plan(self.target_scheme, self.source_scheme, infos, moves)

    def _cast_losses(self) -> Iterator[Finding]:
        for move in self.moves:
            for source in move.sources:
                dtype = self.sources[source].dtype
                if dtype != move.dtype and move.dtype not in WIDENS.get(dtype, ()):
                    yield Finding(f"cast from {dtype} to {move.dtype} loses digits", str(source))

    def _lost_drops(self) -> Iterator[Dropped]:
        equal = {one.extra for one in self.same}
        return (drop for drop in self.dropped if drop.source not in equal)

    def _copies_back(self) -> dict[Ref, list[Copy]]:
        """Return for each source the copies that fill it again; of replicas of one region the first is taken."""
        back: dict[Ref, dict[Box, Copy]] = {}
        for move in self.moves:
            for copy in move.copies:
                back.setdefault(copy.source, {}).setdefault(copy.source_box, copy.reversed(move.target))
        for same in self.same:
            found = {box: copy for box, copy in back.get(same.kept, {}).items() if _inside(box, same.box)}
            back.setdefault(same.extra, {}).update(found)
        return {ref: list(copies.values()) for ref, copies in back.items()}


def _shortened(box: Box, axis: int, first: int, count: int) -> Box:
    span = box[axis]
    return (*box[:axis], Span(span.start + first * span.step, count, span.step), *box[axis + 1 :])


def _inside(box: Box, outer: Box) -> bool:
    return all(_within(a, b) for a, b in zip(box, outer, strict=True))


def _within(one: Span, other: Span) -> bool:
    return other.start <= one.start and one.stop <= other.stop
