"""Placing ranks: every layout, node boundaries, and what does not fit."""

import random

import pytest

from rlctl.hardware.placement import PlacementError, Slot, place
from rlctl.schema.layout import ClusterConfig, PlacementConfig


def at(slots: list[Slot], role: str) -> list[tuple[int, int]]:
    return [(slot.node, slot.device) for slot in slots if slot.role == role]


def test_colocated_replicas_share_the_trainers_devices() -> None:
    cluster = ClusterConfig(nodes=1, devices_per_node=8, device="cuda")
    slots = place(cluster, PlacementConfig(layout="colocated", trainer_ranks=8, replicas=4, replica_tp=2))
    assert at(slots, "trainer") == at(slots, "rollout") == [(0, i) for i in range(8)]
    assert [(s.group, s.group_rank) for s in slots if s.role == "rollout"] == [(i // 2, i % 2) for i in range(8)]


def test_separate_replicas_follow_and_never_straddle_a_node() -> None:
    cluster = ClusterConfig(nodes=3, devices_per_node=8, device="cuda")
    placement = PlacementConfig(layout="separate", trainer_ranks=6, replicas=3, replica_tp=4, reward_devices=1)
    slots = place(cluster, placement)
    assert at(slots, "rollout") == [(1, d) for d in range(8)] + [(2, d) for d in range(4)]
    assert at(slots, "reward") == [(2, 4)]
    with pytest.raises(PlacementError, match="rollout rank 16 finds no device: the cluster has 24"):
        place(cluster, PlacementConfig(layout="separate", trainer_ranks=6, replicas=5, replica_tp=4))


def test_lent_replicas_lie_on_the_trainers_devices() -> None:
    cluster = ClusterConfig(nodes=2, devices_per_node=4, device="cuda")
    placement = PlacementConfig(layout="separate", trainer_ranks=4, replicas=2, replica_tp=2, hybrid_replicas=1)
    slots = place(cluster, placement)
    assert at(slots, "hybrid") == [(0, 0), (0, 1)]
    assert at(slots, "rollout") == [(1, 0), (1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("seed", range(20))
def test_random_placements_keep_their_promises(seed: int) -> None:
    rng = random.Random(seed)
    cluster = ClusterConfig(nodes=rng.randint(1, 4), devices_per_node=rng.choice([1, 2, 4, 8]), device="cuda")
    placement = PlacementConfig(
        layout=rng.choice(["colocated", "separate", "hybrid"]),
        trainer_ranks=rng.choice([1, 2, 4, 6, 8, 16]),
        trainer_tp=1,
        replicas=rng.randint(0, 6),
        replica_tp=rng.choice([t for t in (1, 2, 4, 8) if cluster.devices_per_node % t == 0]),
        reward_devices=rng.randint(0, 2),
    )
    try:
        slots = place(cluster, placement)
    except PlacementError:
        # Devices left over at the ends of nodes may be lost, and no more than that.
        loss = cluster.nodes * (placement.replica_tp - 1)
        needed = placement.trainer_ranks + placement.replicas * placement.replica_tp + placement.reward_devices
        assert needed + loss > cluster.nodes * cluster.devices_per_node
        return
    for role in ("trainer", "rollout", "reward"):
        mine = [s for s in slots if s.role == role]
        assert [s.rank for s in mine] == list(range(len(mine)))
        assert len(set(at(slots, role))) == len(mine)
    for replica in range(placement.replicas):
        assert len({s.node for s in slots if s.role == "rollout" and s.group == replica}) == 1
    if placement.layout == "separate":
        assert not set(at(slots, "trainer")) & set(at(slots, "rollout"))
    assert not set(at(slots, "reward")) & (set(at(slots, "trainer")) | set(at(slots, "rollout")))
