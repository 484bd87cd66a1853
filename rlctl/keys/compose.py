"""From two layouts of one model to the plan that converts one into the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlctl.errors import Finding
from rlctl.keys.boxes import intersect, volume
from rlctl.keys.dtypes import FLOAT_DTYPES
from rlctl.keys.layout import NEW, Layout, Part, Ref, Stored, TensorInfo
from rlctl.keys.plan import Copy, Dropped, Move, Plan, Same


@dataclass(frozen=True, slots=True)
class _Piece:
    stored: Stored
    part: Part


def compose(
    source: Layout,
    target: Layout,
    infos: Mapping[Ref, TensorInfo],
    *,
    dtype: str | None = None,
    keep_dtype: frozenset[str] = frozenset(),
    renamed: Mapping[Ref, str] | None = None,
    drop_unknown: bool = False,
    merged: int = 0,
) -> Plan:
    """Return the plan from ``source`` to ``target``.

    Args:
        source, target: the two layouts, over the same canonical tensors.
        infos: what the source really holds.
        dtype: the element type to cast floating-point tensors to, or None to keep what each has.
        keep_dtype: canonical tensors that are never cast.
        renamed: names that the files really use, where they differ from ``infos`` (wrapper segments), for the report.
        drop_unknown: leave out tensors of unknown names, with a note each, instead of refusing.
        merged: how many source tensors a LoRA merge changes, for the report.
    """
    plan = _Composer(source, target, infos, dtype, keep_dtype, renamed or {}, drop_unknown).plan()
    return replace(plan, merged=merged)


class _Composer:
    def __init__(
        self,
        source: Layout,
        target: Layout,
        infos: Mapping[Ref, TensorInfo],
        dtype: str | None,
        keep_dtype: frozenset[str],
        renamed: Mapping[Ref, str],
        drop_unknown: bool,
    ) -> None:
        self.source, self.target, self.infos = source, target, infos
        self.dtype, self.keep_dtype, self.renamed, self.drop_unknown = dtype, keep_dtype, renamed, drop_unknown
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.dropped: list[Dropped] = []
        self.same: list[Same] = []
        self.unknown: list[Ref] = []
        self.used: set[Ref] = set()
        self.extra: dict[Ref, str] = {}
        self.part_volume: dict[Ref, int] = {}
        self.pieces = self._index()

    def plan(self) -> Plan:
        moves = []
        missing: dict[str, None] = {}
        for stored in self.target.stored.values():
            if not stored.written:
                continue
            copies, lacking = self._copies(stored)
            missing.update(dict.fromkeys(lacking))
            if not lacking:
                moves.append(self._move(stored, copies))
        self._report_missing(list(missing))
        self._report_unused()
        return Plan(
            self.source.scheme,
            self.target.scheme,
            self.infos,
            moves,
            self.dropped,
            self.same,
            self.unknown,
            self.findings,
            self.notes,
        )

    def _index(self) -> dict[str, list[_Piece]]:
        """Return the present pieces of each canonical tensor, replicas taken out; note unknown and misshapen names."""
        present: list[Stored] = []
        for ref, info in self.infos.items():
            stored = self.source.stored.get(ref)
            if stored is None:
                self._outside(ref)
            elif stored.shape != info.shape:
                self.findings.append(
                    Finding(
                        f"has shape {list(info.shape)}, but this model's {self.source.scheme} form needs "
                        f"{list(stored.shape)}",
                        str(ref),
                        "is the config.json that of this checkpoint?",
                    )
                )
            else:
                present.append(stored)
        # Tensors that the scheme must hold come first, so that an alias is measured against them.
        present.sort(key=lambda stored: (not stored.written, stored.optional))
        found: dict[str, list[_Piece]] = defaultdict(list)
        for stored in present:
            self.part_volume[stored.ref] = sum(volume(part.box) for part in stored.parts)
            for part in stored.parts:
                self._add(found[part.tensor], _Piece(stored, part))
        return found

    def _outside(self, ref: Ref) -> None:
        reason = self.source.drop_reason(ref.name)
        if reason is not None:
            self.dropped.append(Dropped(ref, reason))
            return
        self.unknown.append(ref)
        if self.drop_unknown:
            self.dropped.append(Dropped(ref, "unknown name, left out as asked"))
            return
        self.findings.append(Finding(f"unknown name in the {self.source.scheme} form of this model", str(ref)))

    def _add(self, pieces: list[_Piece], new: _Piece) -> None:
        for old in pieces:
            if old.part.box == new.part.box:
                if (old.part.at, old.part.axes) != (new.part.at, new.part.axes):
                    self.findings.append(
                        Finding(f"holds {new.part.tensor}, which {old.stored.ref} holds too", str(new.stored.ref))
                    )
                reason = new.stored.note or "a replica"
                self.same.append(Same(old.stored.ref, new.stored.ref, new.part.at, reason))
                self.extra[new.stored.ref] = f"{reason} (equal to {old.stored.ref})"
                return
        pieces.append(new)

    def _copies(self, stored: Stored) -> tuple[list[Copy], list[str]]:
        """Return the copies that fill ``stored`` and the canonical tensors that the source lacks for it."""
        copies, lacking = [], []
        for part in stored.parts:
            filled = 0
            for piece in self.pieces.get(part.tensor, ()):
                shared = intersect(part.box, piece.part.box)
                if shared is None:
                    continue
                filled += volume(shared)
                axes = _through(part.axes, piece.part.axes)
                ref = piece.stored.ref
                copies.append(Copy(ref, piece.part.narrowed(shared), part.narrowed(shared), axes))
            if filled < volume(part.box) or (volume(part.box) == 0 and part.tensor not in self.pieces):
                lacking.append(part.tensor)
            elif filled > volume(part.box):
                self.findings.append(Finding(f"{part.tensor} is held twice by overlapping tensors", str(stored.ref)))
        return copies, lacking

    def _move(self, stored: Stored, copies: list[Copy]) -> Move:
        self.used.update(copy.source for copy in copies)
        # A rank whose rows are all padding copies nothing, but is stored like the ranks beside it.
        feeding = {copy.source for copy in copies} or {self.pieces[part.tensor][0].stored.ref for part in stored.parts}
        dtypes = sorted({self.infos[ref].dtype for ref in feeding})
        dtype = dtypes[0]
        if self.dtype and dtype in FLOAT_DTYPES and not any(part.tensor in self.keep_dtype for part in stored.parts):
            self._check_cast(stored, dtypes)
            dtype = self.dtype
        elif len(dtypes) > 1:
            self.findings.append(
                Finding(f"would fuse tensors of {' and '.join(dtypes)}", str(stored.ref), "say --dtype")
            )
        return Move(stored.ref, stored.shape, dtype, tuple(copies), self._transforms(stored, copies, dtype))

    def _check_cast(self, stored: Stored, dtypes: list[str]) -> None:
        for dtype in dtypes:
            if dtype.startswith(("F8", "F6", "F4")) and dtype != self.dtype:
                self.findings.append(
                    Finding(f"is quantised ({dtype}); a cast without its scales would be wrong", str(stored.ref))
                )

    def _transforms(self, stored: Stored, copies: list[Copy], dtype: str) -> tuple[str, ...]:
        tags: dict[str, None] = {}
        by_source: dict[Ref, list[Copy]] = defaultdict(list)
        for copy in copies:
            by_source[copy.source].append(copy)
        for ref, group in by_source.items():
            tags.update(dict.fromkeys(self._source_tags(ref, group)))
        if len(by_source) > 1:
            tags["stack" if any(NEW in copy.axes for copy in copies) else "concat"] = None
        if any(not copy.in_order for copy in copies):
            tags["transpose"] = None
        if volume_of(stored) > sum(volume(copy.target_box) for copy in copies):
            tags["pad"] = None
        if any(self.infos[ref].dtype != dtype for ref in by_source):
            tags["cast"] = None
        if not tags:
            (ref,) = by_source
            tags["copy" if self.renamed.get(ref, ref.name) == stored.ref.name else "rename"] = None
        return tuple(tags)

    def _source_tags(self, ref: Ref, group: Sequence[Copy]) -> list[str]:
        tags = []
        if sum(volume(copy.source_box) for copy in group) < self.part_volume[ref]:
            stacked = any(len(copy.source_box) > sum(axis != NEW for axis in copy.axes) for copy in group)
            tags.append("unstack" if stacked else "split")
        elif self.part_volume[ref] < volume_of(self.source.stored[ref]):
            tags.append("unpad")
        boxes = [box for copy in group for box in (copy.source_box, copy.target_box)]
        if len(group) > 1 or any(span.step > 1 for box in boxes for span in box):
            tags.append("interleave")
        return tags

    def _report_missing(self, missing: list[str]) -> None:
        for tensor in missing:
            holders = [
                str(stored.ref)
                for stored in self.source.stored.values()
                if stored.ref not in self.infos and any(part.tensor == tensor for part in stored.parts)
            ]
            self.findings.append(Finding("is missing", " or ".join(holders[:4]) or tensor))

    def _report_unused(self) -> None:
        for ref in self.infos:
            stored = self.source.stored.get(ref)
            if ref in self.extra and ref not in self.used:
                self.dropped.append(Dropped(ref, self.extra[ref]))
            elif stored is not None and not self.part_volume.get(ref, 1) and volume_of(stored):
                self.dropped.append(Dropped(ref, "nothing but padding"))
            elif stored is not None and ref not in self.used and not self.findings:
                self.findings.append(Finding(f"has no place in the {self.target.scheme} form", str(ref)))
            elif stored is not None and not stored.written:
                self.notes.append(f"{ref} stands in for {stored.parts[0].tensor}: {stored.note}")


def volume_of(stored: Stored) -> int:
    """Return the elements of a stored tensor, padding included."""
    count = 1
    for size in stored.shape:
        count *= size
    return count


def _through(target_axes: tuple[int, ...], source_axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each target dimension the source dimension that is the same canonical dimension."""
    place = {axis: position for position, axis in enumerate(source_axes) if axis != NEW}
    return tuple(NEW if axis == NEW else place.get(axis, NEW) for axis in target_axes)
