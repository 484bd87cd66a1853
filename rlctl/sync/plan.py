"""The transfer plan: which exact slices every rollout rank gets from which trainer rank.

What a rank's own device holds is never sent; the rest comes from the nearest holder (same node before network), and
equal holders share the load. So the bytes that move are the lower bound of the two layouts: the sum over rollout ranks
of what they want and their device does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlctl.errors import UsageError
from rlctl.sync.boxes import Box
from rlctl.sync.dealer import Dealer, Run
from rlctl.sync.layout import Layout
from rlctl.sync.links import LinkKind, LinkModel
from rlctl.sync.placement import Cluster, Placement, best_rollout
from rlctl.sync.traffic import Prediction, Traffic
from rlctl.sync.weight_classes import bytes_by_rank, overlap, weight_classes
from rlctl.sync.weights import Weight


class Transfer(NamedTuple):
    """One slice of one weight from a trainer rank to a rollout rank.

    Attributes:
        tensor: name of the weight; ``box``: the slice of it.
        src, dst: trainer rank and rollout rank.
        src_tensor, src_box: where the slice lies in the trainer rank's local tensor.
        dst_tensor, dst_box: where it goes in the rollout rank's local tensor, which may be a fused one (and then may
            have one dimension more: the expert).
        nbytes: its size.
        link: ``device`` is a copy inside one device, which nothing is sent for.
    """

    tensor: str
    box: Box
    src: int
    dst: int
    src_tensor: str
    src_box: Box
    dst_tensor: str
    dst_box: Box
    nbytes: int
    link: LinkKind


@dataclass(frozen=True)
class RankMemory:
    """Bytes on a rollout rank's device: what the rollout wants there, what the trainer holds there, what is both."""

    wanted: int
    held: int
    shared: int

    @property
    def redundant(self) -> int:
        """Bytes of the trainer's weights that the rollout cannot use."""
        return self.held - self.shared

    @property
    def peak(self) -> int:
        """Bytes of weights at the end of a reshard in place: shared parts count once."""
        return self.wanted + self.redundant


class Plan:
    """A plan for one pair of layouts on fixed devices; see the module.

    Attributes:
        runs: the transfers, those that are alike taken together.
        traffic: their bytes.
        wanted: bytes by rollout rank; ``held``: by trainer rank.

    Raises:
        UsageError: layouts and placement do not fit each other, or no trainer rank holds what is wanted.
    """

    def __init__(self, weights: Sequence[Weight], train: Layout, rollout: Layout, placement: Placement) -> None:
        for name, layout, devices in (("trainer", train, placement.train), ("rollout", rollout, placement.rollout)):
            if layout.ranks != len(devices):
                raise UsageError(f"the {name} layout has {layout.ranks} ranks, the placement {len(devices)}")
        self.weights = weights
        self.train = train
        self.rollout = rollout
        self.placement = placement
        self.traffic = Traffic(placement)
        self.wanted = bytes_by_rank(weights, rollout)
        self.held = bytes_by_rank(weights, train)
        self._classes = weight_classes(weights, train, rollout)
        dealer = Dealer(self.traffic, int(self.wanted.sum()))
        dealer.deal(self._classes)
        self.runs = dealer.runs

    @property
    def bytes_moved(self) -> int:
        """Bytes between devices."""
        return self.traffic.moved

    def transfers(self, *, src: int | None = None, dst: int | None = None) -> Iterator[Transfer]:
        """Yield the single transfers, of one trainer rank or to one rollout rank if given.

        The order is the same on every rank, so two ranks that take their part of it agree on the order between them.
        """
        for run in self.runs:
            if (src is None or run.src == src) and (dst is None or run.dst == dst):
                yield from self.expand(run)

    def expand(self, run: Run) -> Iterator[Transfer]:
        """Yield the transfers that are taken together in one of ``runs``."""
        for index in self._classes[run.group].members[run.first : run.first + run.length]:
            weight = self.weights[index]
            source = self.train.local(weight, run.cell.hold[run.src], run.cell.box)
            target = self.rollout.local(weight, run.cell.want.box, run.cell.box)
            box, ends = run.cell.box, (run.src, run.dst)
            yield Transfer(weight.name, box, *ends, *source, *target, run.nbytes, run.link)

    def memory(self, rank: int) -> RankMemory:
        """Return what rollout rank ``rank`` and the trainer keep on its device."""
        device = self.placement.rollout[rank]
        train = self.placement.train
        held = int(self.held[train.index(device)]) if device in train else 0
        return RankMemory(int(self.wanted[rank]), held, int(self.traffic.received["device"][rank]))

    def predict(self, links: LinkModel, *, bucket_nbytes: int = 1 << 30) -> Prediction:
        """Return the seconds that the plan will take; see ``Traffic.predict``."""
        return self.traffic.predict(links, bucket_nbytes=bucket_nbytes)


def best_placement(
    weights: Sequence[Weight],
    train: Layout,
    rollout: Layout,
    cluster: Cluster,
    *,
    train_devices: Sequence[int] | None = None,
    rollout_devices: Sequence[int] | None = None,
    together: int = 1,
) -> Placement:
    """Return the placement whose plan moves the fewest bytes when the rollout may choose among ``rollout_devices``.

    Args:
        weights, train, rollout: as for ``Plan``.
        cluster: the nodes.
        train_devices: fixed devices of the trainer; default: counted from the first.
        rollout_devices: devices that the rollout may use; default: the trainer's.
        together: neighbouring rollout ranks that must stay on one node: its tensor-parallel size.
    """
    fixed = tuple(train_devices) if train_devices is not None else tuple(range(train.ranks))
    pool = tuple(rollout_devices) if rollout_devices is not None else fixed
    shared = [fixed.index(device) if device in fixed else -1 for device in pool]
    columns = np.zeros((rollout.ranks, len(pool)))
    if any(rank >= 0 for rank in shared):
        by_rank = overlap(weights, train, rollout)
        for column, rank in enumerate(shared):
            if rank >= 0:
                columns[:, column] = by_rank[:, rank]
    return Placement(cluster, fixed, best_rollout(columns, pool, cluster, together=together))
