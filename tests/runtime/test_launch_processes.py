"""Places on one machine: what their processes see, and that all of them end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlctl.errors import RlctlError, UnavailableError
from rlctl.runtime.launch.launcher import Launcher, Place
from rlctl.runtime.launch.making import make_launcher
from rlctl.runtime.launch.places import places, shown
from rlctl.schema import Config
from rlctl.schema.layout import ClusterConfig, PlacementConfig
from tests.test_process import gone

ECHO = "tests.process_targets:echo"


def config(device: str = "cpu", *, nodes: int = 1, per_node: int = 8, **placement) -> Config:
    cluster = ClusterConfig(nodes=nodes, devices_per_node=per_node, device=device)
    return Config(cluster=cluster, placement=PlacementConfig(**placement))


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = make_launcher(config(layout="separate", trainer_ranks=2, replicas=1))
    yield made
    made.close()


def test_colocated_places_share_devices_and_a_replica_has_those_of_all_its_ranks():
    found = places(config("cuda", trainer_ranks=4, replicas=2, replica_tp=2, reward_devices=1))
    assert found == {
        Place("trainer", 0): [(0, 0)], Place("trainer", 1): [(0, 1)],
        Place("trainer", 2): [(0, 2)], Place("trainer", 3): [(0, 3)],
        Place("replica", 0): [(0, 0), (0, 1)], Place("replica", 1): [(0, 2), (0, 3)],
        Place("reward", 0): [(0, 4)],
    }  # fmt: skip


def test_separate_places_have_their_own_and_hybrids_the_trainers():
    found = places(config("cuda", layout="separate", trainer_ranks=2, replicas=1, replica_tp=2, hybrid_replicas=1))
    assert found[Place("replica", 0)] == [(0, 2), (0, 3)]
    assert found[Place("hybrid", 0)] == [(0, 0), (0, 1)]


def test_what_is_shown_is_counted_among_what_is_visible():
    assert shown("cuda", [1], {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert shown("cuda", [1, 0], {"CUDA_VISIBLE_DEVICES": "4,6"}) == {"CUDA_VISIBLE_DEVICES": "6,4"}
    assert shown("npu", [2], {"CUDA_VISIBLE_DEVICES": "4"}) == {"ASCEND_RT_VISIBLE_DEVICES": "2"}
    assert shown("cpu", [5], {"CUDA_VISIBLE_DEVICES": "4"}) == {}
    with pytest.raises(RlctlError, match="device 2 is asked for, and CUDA_VISIBLE_DEVICES='GPU-a,GPU-b' shows 2"):
        shown("cuda", [2], {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})


def test_a_process_sees_its_places_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    launcher = make_launcher(config("cuda", layout="separate", trainer_ranks=1, replicas=1, replica_tp=2))
    try:
        for place, seen in ((Place("trainer", 0), "2"), (Place("replica", 0), "3,5")):
            child = launcher.starter(place)(ECHO, name=str(place), env={"MORE": "x"})
            assert child.request("env CUDA_VISIBLE_DEVICES", 10.0) == seen
            assert child.request("env MORE", 10.0) == "x"
    finally:
        launcher.close()


def test_closing_ends_all_that_it_started(launcher: Launcher):
    start = launcher.starter(Place("replica", 0))
    with ThreadPoolExecutor(4) as pool:
        children = list(pool.map(lambda n: start(ECHO, name=f"echo-{n}"), range(4)))
    children[0].kill()
    grandchild = children[1].request("grandchild", 10.0, int)
    launcher.close()
    assert not any(child.alive() for child in children)
    assert gone(grandchild)
    launcher.close()
    assert launcher.address() is None
    assert launcher.one_machine()


def test_several_nodes_want_ray():
    with pytest.raises(UnavailableError, match="this run has 2") as caught:
        make_launcher(config(nodes=2))
    assert "--ray-address" in str(caught.value)


def test_the_run_token_is_the_same_everywhere(launcher: Launcher):
    child = launcher.starter(Place("trainer", 1))(ECHO, name="echo")
    assert child.request("token", 10.0) == os.environ["RLCTL_RUN_TOKEN"]
