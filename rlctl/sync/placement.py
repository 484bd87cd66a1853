"""On which device each rank runs, and the mapping of rollout ranks onto devices that moves the fewest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlctl.errors import UsageError
from rlctl.sync.assignment import assign
from rlctl.sync.links import LinkKind

Overlap = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes; devices are numbered through all of them, neighbours share a network card when there are fewer."""

    devices_per_node: int = 8
    nics_per_node: int = 8

    def node(self, device: int) -> int:
        """Return the node of a device."""
        return device // self.devices_per_node

    def nic(self, device: int) -> int:
        """Return the network card that a device uses, numbered through all nodes."""
        local = device % self.devices_per_node * self.nics_per_node // self.devices_per_node
        return self.node(device) * self.nics_per_node + local

    def link(self, a: int, b: int) -> LinkKind:
        """Return what lies between two devices."""
        if a == b:
            return "device"
        return "node" if self.node(a) == self.node(b) else "network"


@dataclass(frozen=True)
class Placement:
    """Devices of the trainer's and of the rollout's ranks; a device may have one of each."""

    cluster: Cluster
    train: tuple[int, ...]
    rollout: tuple[int, ...]

    def __post_init__(self) -> None:
        for side in (self.train, self.rollout):
            if len(set(side)) != len(side):
                raise UsageError("two ranks of one side are on the same device")

    @classmethod
    def separate(cls, cluster: Cluster, train_ranks: int, rollout_ranks: int) -> Placement:
        """The trainer first, the rollout on the next whole node."""
        per_node = cluster.devices_per_node
        start = (
            train_ranks
            if train_ranks % per_node + rollout_ranks <= per_node
            else -(-train_ranks // per_node) * per_node
        )
        return cls(cluster, tuple(range(train_ranks)), tuple(range(start, start + rollout_ranks)))

    @classmethod
    def colocated(cls, cluster: Cluster, train_ranks: int, rollout_ranks: int) -> Placement:
        """Both sides count from the first device."""
        return cls(cluster, tuple(range(train_ranks)), tuple(range(rollout_ranks)))


def best_rollout(overlap: Overlap, devices: Sequence[int], cluster: Cluster, *, together: int = 1) -> tuple[int, ...]:
    """Return the device of every rollout rank, so that as many bytes as can be are on their device already.

    Args:
        overlap: (rollout ranks, devices): bytes that a rank wants and a device holds, columns in order of ``devices``.
        devices: that the rollout may use, at least as many as ranks.
        cluster: the nodes.
        together: neighbouring ranks that stay on one node (a tensor-parallel group), where a node has room for them.

    Groups go to nodes first, then ranks to devices of their node; both are assignment problems, solved exactly.
    """
    ranks = overlap.shape[0]
    if ranks > len(devices):
        raise UsageError(f"{ranks} rollout ranks do not fit on {len(devices)} devices")
    if not overlap.any():
        return tuple(devices[:ranks])
    nodes: dict[int, list[int]] = {}
    for column, device in enumerate(devices):
        nodes.setdefault(cluster.node(device), []).append(column)
    fits = all(len(columns) % together == 0 for columns in nodes.values())
    if together == 1 or len(nodes) == 1 or ranks % together or not fits:
        return tuple(devices[c] for c in assign(overlap))
    groups = [list(range(g, g + together)) for g in range(0, ranks, together)]
    seats = [columns for columns in nodes.values() for _ in range(len(columns) // together)]
    # A group's worth on a node: its ranks on the node's best devices, each for itself.
    worth = np.array([[overlap[np.ix_(group, seat)].max(axis=1).sum() for seat in seats] for group in groups])
    by_node: dict[int, list[int]] = {}
    for group, seat in zip(groups, assign(worth), strict=True):
        by_node.setdefault(seats[seat][0], []).extend(group)
    found = [0] * ranks
    for first, members in by_node.items():
        columns = next(c for c in nodes.values() if c[0] == first)
        for rank, column in zip(members, assign(overlap[np.ix_(members, columns)]), strict=True):
            found[rank] = devices[columns[column]]
    return tuple(found)
