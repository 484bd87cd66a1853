"""The layout that a user's map makes of the stored names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlctl.errors import Finding
from rlctl.keys.boxes import Box, Shape, Span, whole
from rlctl.keys.custom_map import MAX_NAME, Rule
from rlctl.keys.layout import Drop, Layout, Part, Ref, Stored, TensorInfo, layout
from rlctl.keys.shapes import Shapes


@dataclass
class Mapped:
    """What a map makes of the stored tensors.

    Args:
        layout: each stored tensor as parts of the targets.
        shapes: targets and their shapes: the model's own where it is known, else as the map makes them.
        findings: names that collide, pieces that do not fit.
        idle: rules that matched nothing.
    """

    layout: Layout
    shapes: Shapes
    findings: list[Finding] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


def mapped_layout(
    rules: Sequence[Rule], infos: Mapping[Ref, TensorInfo], known: Shapes | None, drops: Sequence[Drop]
) -> Mapped:
    """Apply ``rules`` to the stored tensors.

    Args:
        rules: the map.
        infos: what is stored.
        known: shapes of the model's tensors, or None for a model that is not known.
        drops: names that may be left out without a rule.
    """
    return _Mapping(rules, infos, known, drops).run()


class _Mapping:
    def __init__(
        self, rules: Sequence[Rule], infos: Mapping[Ref, TensorInfo], known: Shapes | None, drops: Sequence[Drop]
    ) -> None:
        self.rules, self.infos, self.known, self.drops = rules, infos, known, list(drops)
        self.shapes: Shapes = dict(known or {})
        self.findings: list[Finding] = []
        self.owner: dict[str, Ref] = {}
        self.groups: dict[tuple[int, str], dict[int, Ref]] = {}
        self.stored: list[Stored] = []

    def run(self) -> Mapped:
        used: set[int] = set()
        for ref, info in self.infos.items():
            index, found = self._rule(ref)
            if index is None:
                self._keep(ref, info)
                continue
            used.add(index)
            rule = self.rules[index]
            assert found is not None
            place, targets = found
            if rule.drop:
                self.drops.append(_exactly(ref.name, rule.drop))
            elif rule.concat is not None:
                group = self.groups.setdefault((index, targets[0]), {})
                if place in group:
                    self.findings.append(Finding(f"becomes a part of {targets[0]}, as {group[place]} does", str(ref)))
                group[place] = ref
            else:
                self._split(rule, ref, info, targets)
        for (index, target), members in self.groups.items():
            self._concat(self.rules[index], target, members)
        idle = [f"{rule.where}: matches no name" for index, rule in enumerate(self.rules) if index not in used]
        return Mapped(layout("map", self.stored, self.drops), self.shapes, self.findings, idle)

    def _rule(self, ref: Ref) -> tuple[int | None, tuple[int, tuple[str, ...]] | None]:
        if len(ref.name) > MAX_NAME:
            self.findings.append(Finding(f"a name of {len(ref.name)} characters is too long for a map", ref.name[:80]))
            return None, None
        for index, rule in enumerate(self.rules):
            found = rule.match(ref.name)
            if found is not None:
                return index, found
        return None, None

    def _keep(self, ref: Ref, info: TensorInfo) -> None:
        if any(drop.pattern.search(ref.name) for drop in self.drops):
            return
        if self.known is not None and ref.name not in self.known:
            return  # unknown, and reported as such
        self._claim(ref.name, ref)
        self._add(ref, info, [self._part(ref.name, ref, info.shape, info.shape, None, 0)])

    def _split(self, rule: Rule, ref: Ref, info: TensorInfo, targets: tuple[str, ...]) -> None:
        shape = _turned(info.shape, rule, ref, self.findings)
        sizes = self._sizes(rule, ref, shape, targets)
        if shape is None or sizes is None:
            return
        parts, at = [], 0
        for target, size in zip(targets, sizes, strict=True):
            self._claim(target, ref)
            piece = shape if rule.split is None else _with(shape, rule.split, size)
            parts.append(self._part(target, ref, piece, info.shape, rule.split, at, transpose=rule.transpose))
            at += size
        self._add(ref, info, parts)

    def _sizes(self, rule: Rule, ref: Ref, shape: Shape | None, targets: tuple[str, ...]) -> list[int] | None:
        if rule.split is None or shape is None:
            return [0] * len(targets)
        if rule.split >= len(shape):
            self.findings.append(Finding(f"cannot be split along dimension {rule.split}", str(ref)))
            return None
        total = shape[rule.split]
        if rule.sizes:
            sizes = list(rule.sizes)
        elif self.known is not None and all(target in self.known for target in targets):
            sizes = [self.known[target][rule.split] for target in targets]
        else:
            sizes = [total // len(targets)] * len(targets)
        if len(sizes) != len(targets) or sum(sizes) != total:
            self.findings.append(Finding(f"{total} along dimension {rule.split} is not split into {sizes}", str(ref)))
            return None
        return sizes

    def _concat(self, rule: Rule, target: str, members: Mapping[int, Ref]) -> None:
        missing = [pattern.pattern for place, pattern in enumerate(rule.patterns) if place not in members]
        if missing:
            self.findings.append(Finding(f"no tensor matches {missing[0]}", target))
            return
        assert rule.concat is not None
        self._claim(target, members[0])
        at = 0
        turned = []
        for place in range(len(rule.patterns)):
            shape = _turned(self.infos[members[place]].shape, rule, members[place], self.findings)
            if shape is None or rule.concat >= len(shape):
                self.findings.append(Finding(f"cannot be joined along dimension {rule.concat}", str(members[place])))
                return
            turned.append(shape)
        total = _with(turned[0], rule.concat, sum(shape[rule.concat] for shape in turned))
        if any(_with(shape, rule.concat, 0) != _with(total, rule.concat, 0) for shape in turned):
            self.findings.append(Finding(f"its parts {[list(s) for s in turned]} do not fit together", target))
            return
        self._expect(target, total, members[0])
        for place, shape in enumerate(turned):
            ref = members[place]
            box = tuple(Span(at if d == rule.concat else 0, size) for d, size in enumerate(shape))
            part = Part(target, box, whole(self.infos[ref].shape), _axes(len(shape), transpose=rule.transpose))
            self._add(ref, self.infos[ref], [part])
            at += shape[rule.concat]

    def _part(
        self, target: str, ref: Ref, shape: Shape, stored: Shape, split: int | None, at: int, *, transpose: bool = False
    ) -> Part:
        self._expect(target, shape, ref)
        axes = _axes(len(stored), transpose=transpose)
        place: Box = tuple(Span(at if axis == split else 0, shape[axis]) for axis in axes)
        return Part(target, whole(shape), place, axes)

    def _claim(self, target: str, ref: Ref) -> None:
        if target in self.owner:
            self.findings.append(Finding(f"becomes {target}, as {self.owner[target]} does", str(ref)))
        self.owner.setdefault(target, ref)

    def _expect(self, target: str, shape: Shape, ref: Ref) -> None:
        wanted = self.shapes.setdefault(target, shape) if self.known is None else self.shapes.get(target)
        if wanted is None:
            self.findings.append(Finding(f"becomes {target}, which this model does not have", str(ref)))
        elif wanted != shape:
            self.findings.append(Finding(f"becomes {target} of shape {list(shape)}, not {list(wanted)}", str(ref)))

    def _add(self, ref: Ref, info: TensorInfo, parts: list[Part]) -> None:
        self.stored.append(Stored(ref, info.shape, tuple(parts)))


def _exactly(name: str, reason: str) -> Drop:
    import re

    return Drop(re.compile(rf"^{re.escape(name)}$"), reason)


def _turned(shape: Shape, rule: Rule, ref: Ref, findings: list[Finding]) -> Shape | None:
    if not rule.transpose:
        return shape
    if len(shape) < 2:
        findings.append(Finding("cannot be transposed", str(ref)))
        return None
    return (*shape[:-2], shape[-1], shape[-2])


def _axes(count: int, *, transpose: bool) -> tuple[int, ...]:
    axes = tuple(range(count))
    return (*axes[:-2], axes[-1], axes[-2]) if transpose else axes


def _with(shape: Shape, dimension: int, size: int) -> Shape:
    return (*shape[:dimension], size, *shape[dimension + 1 :])
