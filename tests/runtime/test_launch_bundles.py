"""From a configuration to what Ray is asked for."""

from __future__ import annotations

import random

import pytest

from rlctl.errors import UnavailableError
from rlctl.hardware.placement import PlacementError
from rlctl.runtime.launch.bundles import bundles, strategy
from rlctl.runtime.launch.launcher import Place
from rlctl.runtime.launch.places import places
from tests.runtime.test_launch_processes import config

T, R, H = (lambda n, kind=kind: Place(kind, n) for kind in ("trainer", "replica", "hybrid"))


def test_colocated_ranks_and_replicas_share_bundles():
    made = bundles(config("cuda", trainer_ranks=4, replicas=2, replica_tp=2))
    assert [b.places for b in made] == [
        {T(0): (0,), T(1): (1,), R(0): (0, 1)},
        {T(2): (0,), T(3): (1,), R(1): (0, 1)},
    ]
    assert [b.resources("cuda") for b in made] == [{"CPU": 2.0, "GPU": 2.0}] * 2


def test_separate_ones_have_their_own():
    made = bundles(config("npu", layout="separate", trainer_ranks=2, replicas=2, replica_tp=2, reward_devices=1))
    assert [b.places for b in made] == [
        {T(0): (0,)}, {T(1): (0,)}, {R(0): (0, 1)}, {R(1): (0, 1)}, {Place("reward", 0): (0,)},
    ]  # fmt: skip
    assert [b.resources("npu") for b in made][2] == {"CPU": 2.0, "NPU": 2.0}


def test_a_tensor_parallel_trainer_stays_together_and_hybrids_are_on_its_devices():
    made = bundles(
        config("cuda", layout="separate", trainer_ranks=4, trainer_tp=2, replicas=1, hybrid_replicas=2, replica_tp=1)
    )
    assert [b.places for b in made] == [
        {T(0): (0,), T(1): (1,), H(0): (0,), H(1): (1,)},
        {T(2): (0,), T(3): (1,)},
        {R(0): (0,)},
    ]


def test_processes_on_a_cpu_machine_ask_for_cores_alone():
    made = bundles(config(layout="separate", trainer_ranks=2, replicas=1))
    assert [b.resources("cpu") for b in made] == [{"CPU": 1.0}] * 3


def test_a_plan_of_one_node_stays_on_one():
    assert strategy(config()) == "STRICT_PACK"
    assert strategy(config(nodes=2)) == "PACK"


def test_a_replica_over_two_nodes_is_refused():
    with pytest.raises(UnavailableError, match="a tensor-parallel group of 8 devices does not fit into one node"):
        bundles(config("cuda", nodes=4, per_node=4, layout="separate", trainer_ranks=8, replicas=1, replica_tp=8))


@pytest.mark.parametrize("seed", range(30))
def test_random_plans_keep_every_device_once_and_whole_places_together(seed: int):
    rng = random.Random(seed)
    tp = rng.choice([1, 2, 4])
    plan = config(
        "cuda",
        nodes=rng.randint(1, 4),
        per_node=rng.choice([4, 8]),
        layout=rng.choice(["colocated", "separate", "hybrid"]),
        trainer_ranks=tp * rng.randint(1, 4),
        trainer_tp=tp,
        replicas=rng.randint(0, 4),
        replica_tp=rng.choice([1, 2, 4]),
        hybrid_replicas=rng.randint(0, 1),
        reward_devices=rng.randint(0, 2),
    )
    try:
        found = places(plan)
    except PlacementError:
        return
    made = bundles(plan)
    assert sum(b.size for b in made) == len({device for devices in found.values() for device in devices})
    assert sorted(map(str, found)) == sorted(str(place) for b in made for place in b.places)
    real = dict(found)
    for bundle in made:
        devices = sorted({device for place in bundle.places for device in real[place]})
        assert len(devices) == bundle.size
        assert len({node for node, _ in devices}) == 1
        for place, numbers in bundle.places.items():
            assert [devices[number] for number in numbers] == real[place]
