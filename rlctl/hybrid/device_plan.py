"""What moves when a set of devices goes from training to generation, and which device generates what."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.errors import UsageError
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.plan import Plan, best_placement
from rlctl.sync.weights import Weight


def device_plan(
    weights: Sequence[Weight], train: ParallelLayout, rollout: ParallelLayout, *, devices_per_node: int = 0
) -> Plan:
    """Return the plan of devices that are numbered as the trainer's ranks are; the rollout's are where
    ``device_placement`` has them.

    Args:
        weights: of the model.
        train: of all devices.
        rollout: of all replicas.
        devices_per_node: 0: one node.

    Raises:
        UsageError: the rollout has more ranks than there are devices, or the model cannot be cut so.
    """
    if rollout.ranks > train.ranks:
        raise UsageError(
            f"{rollout.ranks} rollout ranks do not fit on the trainer's {train.ranks} devices, which they share",
            where="placement.replicas",
            fix=f"set placement.replicas={train.ranks // rollout.engine_ranks}, or a smaller placement.replica_tp",
        )
    cluster = Cluster(devices_per_node or train.ranks)
    return Plan(weights, train, rollout, device_placement(weights, train, rollout, cluster, range(train.ranks)))


def device_placement(
    weights: Sequence[Weight],
    train: ParallelLayout,
    rollout: ParallelLayout,
    cluster: Cluster,
    devices: Sequence[int],
) -> Placement:
    """Return the placement of a rollout on the trainer's own ``devices``: where most of what its ranks want lies
    already, the ranks of one replica in ascending order of their devices, as process groups number them."""
    best = best_placement(weights, train, rollout, cluster, train_devices=tuple(devices), together=rollout.engine_ranks)
    size = rollout.engine_ranks
    taken = [d for first in range(0, rollout.ranks, size) for d in sorted(best.rollout[first : first + size])]
    return Placement(cluster, best.train, tuple(taken))


def trainer_layout(ranks: int, tp: int) -> ParallelLayout:
    """Return where FSDP2, over tensor parallelism, keeps the weights."""
    return ParallelLayout.fsdp(ranks // tp, tp=tp, whole_vocab=True)


def embedded_layout(replicas: int, tp: int, *, pad: bool = False) -> ParallelLayout:
    """Return where the tensor-parallel sampler wants the weights; see ``ParallelLayout`` for what is padded."""
    return ParallelLayout(tp=tp, replicas=replicas, fused=True, padded=pad)


def rollout_layout(engine: str, replicas: int, tp: int, *, pad: bool = False) -> ParallelLayout:
    """Return where a rollout engine wants the weights, by its configured name. Raises UsageError when it would have
    to pad them and cannot."""
    if engine != "vllm":
        return embedded_layout(replicas, tp, pad=pad)
    if pad:
        raise UsageError("vLLM takes heads and widths as they are", fix="leave pad out, or let transformers generate")
    return ParallelLayout.vllm(tp=tp, replicas=replicas)
