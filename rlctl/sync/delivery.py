"""The transfer plan of what an engine delivers: slices to each rank, or whole tensors to one worker a replica."""

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

    With ``whole`` a replica has one worker, on the device of its first rank, that gets every tensor once; its ranks
    take their parts out of the worker's memory. What the trainer's ranks gather among themselves is not counted.

    Raises:
        UsageError: as for Plan.
    """
    if delivery == "slices":
        return Plan(weights, train, rollout, placement)
    workers = placement.rollout[:: rollout.engine_ranks]
    whole = Placement(placement.cluster, placement.train, workers)
    return Plan(weights, train, ParallelLayout(replicas=rollout.replicas), whole)
