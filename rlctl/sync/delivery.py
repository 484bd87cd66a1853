"""The transfer plan of what an engine delivers: slices to each rank, or whole tensors to a worker of each replica."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.sync.layout import ParallelLayout
from rlctl.sync.placement import Placement
from rlctl.sync.plan import Plan
from rlctl.sync.traits import Delivery
from rlctl.sync.weights import Weight


def planned(
    delivery: Delivery, weights: Sequence[Weight], train: ParallelLayout, rollout: ParallelLayout, placement: Placement
) -> Plan:
    """Return the plan whose bytes cross the wire.

    With ``whole`` a replica has a worker on each node that it is on, at the device of its first rank there, that gets
    every tensor once; ranks take their parts out of the worker's memory. What the trainer's ranks gather among
    themselves is not counted.

    Raises:
        UsageError: as for Plan.
    """
    if delivery == "slices":
        return Plan(weights, train, rollout, placement)
    cluster, devices, size = placement.cluster, placement.rollout, rollout.engine_ranks
    workers: dict[tuple[int, int], int] = {}
    for rank, device in enumerate(devices):
        workers.setdefault((rank // size, cluster.node(device)), device)
    where = Placement(cluster, placement.train, tuple(workers.values()))
    return Plan(weights, train, ParallelLayout(replicas=len(workers)), where)
