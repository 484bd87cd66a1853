"""What engines keep from one sync to the next is never used for anything else. Nothing is verified here, so that
what is out of date shows in the weights themselves."""

from __future__ import annotations

import random

import pytest

from rlctl.sync.registry import CHECKPOINT_ENGINES
from tests.sync.kept_scene import Rng, Scene
from tests.sync.side import side
from tests.sync.squad import runnable

EVENTS = [
    Scene.step,
    Scene.one_stays_as_it_is,
    Scene.source_moves,
    Scene.targets_move,
    Scene.one_moves_within_its_memory,
    Scene.source_is_another,
    Scene.targets_are_others,
    Scene.one_is_another,
    Scene.shapes_change,
    Scene.shapes_change_in_place,
    Scene.strides_change_in_place,
    Scene.sizes_change,
    Scene.dtypes_change,
    Scene.names_change,
    Scene.names_are_swapped,
    Scene.order_changes,
    Scene.one_more,
    Scene.one_less,
    Scene.one_is_not_sent,
    Scene.not_bound_any_more,
    Scene.shadows_take_turns,
    Scene.replica_leaves,
    Scene.replica_joins,
    Scene.replicas_change_seats,
    Scene.trainer_starts_anew,
    Scene.a_sync_breaks,
]


BACKENDS = [
    "naive",
    "ipc:ring",
    "ipc:mapped",
    "gloo",
    "kimi",
    pytest.param("nixl", marks=pytest.mark.nixl),
    pytest.param("nixl:chain", marks=pytest.mark.nixl),
    pytest.param("mooncake", marks=pytest.mark.mooncake),
]


@pytest.mark.parametrize("case", BACKENDS)
def test_nothing_out_of_date_is_used(case: str) -> None:
    """Every event once, in an order of its own, after syncs that let everything be kept."""
    runnable(case)
    backend, _, way = case.partition(":")
    extras = {"topology": way} if backend == "nixl" and way else {"way": way} if way else {}
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = Rng(seed)
    with side(CHECKPOINT_ENGINES.load(backend), 1, 2, verify="off", extras=extras, bucket_size=600_000) as given:
        scene = Scene(rng, given, bound=rng.random() < 0.8)
        for event in rng.sample(EVENTS, len(EVENTS)):
            for _ in range(2):
                scene.step()
                scene.sync()
            print(event.__name__)
            event(scene)
            scene.sync()
