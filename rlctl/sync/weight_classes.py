"""Weights that lie alike, taken together: a model of seventy thousand tensors has a few thousand kinds of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlctl.errors import UsageError
from rlctl.sync.boxes import Box, disjoint_cells, intersect, volume
from rlctl.sync.layout import Layout, Share
from rlctl.sync.placement import Overlap
from rlctl.sync.traffic import Counts
from rlctl.sync.weights import Weight


@dataclass(frozen=True)
class Cell:
    """A part of a weight that some rollout ranks want and some trainer ranks hold.

    Attributes:
        box: the part, in the whole weight.
        want: the share that the rollout ranks want it for.
        hold: for each trainer rank of ``sources``, its share around the part.
        sources: trainer ranks that hold it.
    """

    box: Box
    want: Share
    sources: tuple[int, ...]
    hold: dict[int, Box]


@dataclass(frozen=True)
class WeightClass:
    """Weights of one shape and dtype that lie alike on both sides.

    Attributes:
        members: their indices.
        weight: one of them.
    """

    members: list[int]
    weight: Weight
    hold: Sequence[Share]
    want: Sequence[Share]

    def cells(self) -> Iterator[Cell]:
        """Yield the wanted parts, cut so that each has one set of sources.

        Raises UsageError when a wanted part is held by no trainer rank.
        """
        parts = disjoint_cells([share.box for share in self.hold])
        holders = [self._holders(owners) for _, owners in parts]
        low = np.array([[a for a, _ in box] for box, _ in parts]).reshape(len(parts), -1)
        high = np.array([[b for _, b in box] for box, _ in parts]).reshape(len(parts), -1)
        for want in self.want:
            begin, end = (np.array([side[i] for side in want.box]) for i in (0, 1))
            meets = np.flatnonzero(((low < end) & (high > begin)).all(axis=1))
            covered = 0
            for i in meets:
                box = intersect(parts[i][0], want.box)
                assert box is not None
                covered += volume(box)
                yield Cell(box, want, tuple(holders[i]), holders[i])
            if covered != volume(want.box):
                raise UsageError(
                    f"{volume(want.box) - covered} elements of {self.weight.name} are wanted by rollout rank "
                    f"{want.ranks[0]} and held by no trainer rank"
                )

    def _holders(self, owners: Sequence[int]) -> dict[int, Box]:
        return {rank: self.hold[i].box for i in owners for rank in self.hold[i].ranks}


def weight_classes(weights: Sequence[Weight], train: Layout, rollout: Layout) -> list[WeightClass]:
    """Return the classes of ``weights``; those that no rollout rank wants are left out."""
    found: dict[Hashable, list[int]] = {}
    for index, weight in enumerate(weights):
        found.setdefault((weight.shape, weight.dtype, train.key(weight), rollout.key(weight)), []).append(index)
    classes = []
    for members in found.values():
        weight = weights[members[0]]
        want = rollout.shares(weight)
        if want and weight.elements:
            classes.append(WeightClass(members, weight, train.shares(weight), want))
    return classes


def overlap(weights: Sequence[Weight], train: Layout, rollout: Layout) -> Overlap:
    """Return (rollout ranks, trainer ranks): bytes that one wants and the other holds."""
    found = np.zeros((rollout.ranks, train.ranks))
    for group in weight_classes(weights, train, rollout):
        per_element = group.weight.nbytes / group.weight.elements * len(group.members)
        for cell in group.cells():
            found[np.ix_(cell.want.ranks, cell.sources)] += volume(cell.box) * per_element
    return found


def bytes_by_rank(weights: Sequence[Weight], layout: Layout) -> Counts:
    """Return the bytes of weights that each rank of a layout keeps."""
    alike: dict[Hashable, list[Weight]] = {}
    for weight in weights:
        alike.setdefault((weight.shape, weight.dtype, layout.key(weight)), []).append(weight)
    found = np.zeros(layout.ranks, np.int64)
    for weight, *others in alike.values():
        for share in layout.shares(weight):
            part = volume(share.box) * weight.nbytes // max(weight.elements, 1)
            found[list(share.ranks)] += part * (1 + len(others))
    return found
