"""What devices keep while they train, so that the next switch moves only what changed. Arithmetic only."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from rlctl.hybrid.device_plan import device_plan, rollout_layout, trainer_layout
from rlctl.hybrid.zeros import zeros_nbytes
from rlctl.keys.model_spec import ModelSpec
from rlctl.sync.boxes import volume
from rlctl.sync.plan import Plan
from rlctl.sync.weights import model_weights


def sent_nbytes(plan: Plan) -> list[int]:
    """Return, by trainer rank, the bytes of its shards of which others lack a part, in the dtype that travels: what it
    keeps a copy of (``reshard.deltas.SentBase``)."""
    members: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for run in plan.runs:
        if run.link != "device":
            each = volume(run.cell.hold[run.src]) * run.nbytes // volume(run.cell.box)
            members[run.src, run.group, each].update(range(run.first, run.first + run.length))
    found = [0] * plan.train.ranks
    for (rank, _, nbytes), which in members.items():
        found[rank] += len(which) * nbytes
    return found


@cache
def kept_nbytes(
    spec: ModelSpec,
    dtype: str,
    ranks: int,
    trainer_tp: int,
    replicas: int,
    replica_tp: int,
    devices_per_node: int,
    engine: str = "transformers",
    pad: bool = False,
) -> list[tuple[int, int]]:
    """Return, by device, the bytes of the generation shards and of the copy of what was sent that it keeps.

    Args:
        spec, dtype: of the model, and the safetensors code of what generation computes in.
        ranks, trainer_tp: of the trainer.
        replicas, replica_tp: that generate.
        devices_per_node: 0: one node.
        engine: what generates; ``pad``: its shards are kept with their zeros.

    Raises:
        UsageError: the model cannot be cut so, or there are too few devices.
    """
    train, rollout = trainer_layout(ranks, trainer_tp), rollout_layout(engine, replicas, replica_tp, pad=pad)
    plan = device_plan(model_weights(spec, dtype), train, rollout, devices_per_node=devices_per_node)
    sizes = [int(wanted) + zeros for wanted, zeros in zip(plan.wanted, zeros_nbytes(plan), strict=True)]
    at = dict(zip(plan.placement.rollout, sizes, strict=True))
    shards = [at.get(device, 0) for device in plan.placement.train]
    return list(zip(shards, sent_nbytes(plan), strict=True))
