"""Giving every wanted part of every weight a source: the nearest holder, the load spread over equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlctl.sync.boxes import volume
from rlctl.sync.links import LinkKind
from rlctl.sync.traffic import Counts, Traffic
from rlctl.sync.weight_classes import Cell, WeightClass

# A class of weights is dealt out in pieces of about this share of what one source sends in all.
LOAD_GRAIN = 64


class Run(NamedTuple):
    """The same slice of neighbouring weights of one class: members ``first`` to ``first + length``."""

    group: int
    first: int
    length: int
    src: int
    dst: int
    cell: Cell
    nbytes: int
    link: LinkKind


class Dealer:
    """Deals cells out to sources and counts the traffic."""

    def __init__(self, traffic: Traffic, wanted: int) -> None:
        self.runs: list[Run] = []
        self._traffic = traffic
        placement = traffic.placement
        self._cluster = placement.cluster
        self._devices = placement.rollout
        self._rank_on = {device: rank for rank, device in enumerate(placement.train)}
        self._card_of = np.array([placement.cluster.nic(device) for device in placement.train])
        self._node_of = np.array([placement.cluster.node(device) for device in placement.train])
        self._grain = max(wanted // (LOAD_GRAIN * len(placement.train)), 1)

    def deal(self, classes: Sequence[WeightClass]) -> None:
        """Fill ``runs``."""
        # The heaviest first: the light ones then even out what is left uneven.
        order = sorted(range(len(classes)), key=lambda i: -classes[i].weight.nbytes * len(classes[i].members))
        for group in order:
            weight = classes[group].weight
            for cell in classes[group].cells():
                nbytes = volume(cell.box) * weight.nbytes // weight.elements
                sources = np.array(cell.sources)
                for dst in cell.want.ranks:
                    self._deal_one(group, len(classes[group].members), cell, sources, dst, nbytes)

    def _deal_one(self, group: int, members: int, cell: Cell, sources: Counts, dst: int, nbytes: int) -> None:
        device = self._devices[dst]
        own = self._rank_on.get(device, -1)
        if own in cell.hold:
            self._add(Run(group, 0, members, own, dst, cell, nbytes, "device"))
            return
        near = sources[self._node_of[sources] == self._cluster.node(device)]
        kind: LinkKind = "node" if near.size else "network"
        candidates = near if near.size else sources
        pieces = min(members, candidates.size, -(-members * nbytes // self._grain))
        for piece in range(pieces):
            first, end = members * piece // pieces, members * (piece + 1) // pieces
            src = int(candidates[self._load(candidates, kind).argmin()])
            self._add(Run(group, first, end - first, src, dst, cell, nbytes, kind))

    def _load(self, candidates: Counts, kind: LinkKind) -> npt.NDArray[np.float64]:
        sent = self._traffic.sent[kind][candidates]
        if kind == "node":
            return sent.astype(float)
        # Cards first; between devices that share one, the idler device.
        loads: npt.NDArray[np.float64] = self._traffic.card_sent[self._card_of[candidates]] + 1e-6 * sent
        return loads

    def _add(self, run: Run) -> None:
        self.runs.append(run)
        self._traffic.add(run.src, run.dst, run.link, run.nbytes * run.length)
