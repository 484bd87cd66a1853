"""Where every rank runs: a pure function of the cluster and the placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlctl.errors import UsageError
from rlctl.schema.layout import ClusterConfig, PlacementConfig

Role = Literal["trainer", "rollout", "hybrid", "reward"]


@dataclass(frozen=True)
class Slot:
    """One rank on one device.

    Attributes:
        role: "trainer", "rollout" (a replica's rank), "hybrid" (a replica's rank on a trainer's device that joins and
            leaves) or "reward".
        rank: number within the role, from 0.
        node, device: where it runs; the device is counted within its node.
        group: the tensor-parallel group of a trainer rank, the replica of a rollout rank.
        group_rank: rank within that group.
    """

    role: Role
    rank: int
    node: int
    device: int
    group: int
    group_rank: int


class PlacementError(UsageError):
    """The ranks do not fit on the cluster: the first of ``role`` that finds no device."""

    def __init__(self, role: Role, rank: int, devices: int) -> None:
        super().__init__(f"{role} rank {rank} finds no device: the cluster has {devices}")
        self.role = role


def place(cluster: ClusterConfig, placement: PlacementConfig) -> list[Slot]:
    """Return every rank with its device, trainer ranks first.

    Trainer ranks take devices in order from the first. Replicas share those devices (colocated, hybrid) or follow
    after them (separate); the ranks of a replica stay within one node whenever the replica fits into one, so a replica
    that would straddle two nodes starts on the next. A reward model's devices come last.

    Raises:
        PlacementError: more devices are needed than the cluster has.
    """
    take = _Cursor(cluster)
    slots = _ranks("trainer", placement.trainer_ranks // placement.trainer_tp, placement.trainer_tp, take)
    tp = placement.replica_tp
    if placement.layout == "separate":
        slots += _ranks("rollout", placement.replicas, tp, take)
    else:
        slots += _ranks("rollout", placement.replicas, tp, shared := _Cursor(cluster))
        take.position = max(take.position, shared.position)
    slots += _ranks("hybrid", placement.hybrid_replicas, tp, _Cursor(cluster))
    slots += _ranks("reward", placement.reward_devices, 1, take)
    return slots


class _Cursor:
    """The next free device of a cluster."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.per_node = cluster.devices_per_node
        self.total = cluster.nodes * cluster.devices_per_node
        self.position = 0

    def block(self, size: int) -> range:
        left = self.per_node - self.position % self.per_node
        if left < size <= self.per_node:
            self.position += left
        start = self.position
        self.position += size
        return range(start, self.position)


def _ranks(role: Role, groups: int, size: int, take: _Cursor) -> list[Slot]:
    slots: list[Slot] = []
    for group in range(groups):
        for group_rank, at in enumerate(take.block(size)):
            if at >= take.total:
                raise PlacementError(role, len(slots), take.total)
            slots.append(Slot(role, len(slots), at // take.per_node, at % take.per_node, group, group_rank))
    return slots
