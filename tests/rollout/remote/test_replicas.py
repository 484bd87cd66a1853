"""Replicas in processes of their own: requests, syncs, deaths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.rollout.remote.replica import RemoteReplica
from rlctl.sync.deadline import Deadline
from rlctl.sync.member import described
from rlctl.sync.states import Ending
from tests.rollout.remote.house import Ear, House, alone, assert_same, begun, setup_of
from tests.rollout.tiny import make_requests


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RemoteReplica]]:
    folder: Path = tmp_path_factory.mktemp("model")
    made = begun([setup_of(folder, name) for name in ("a", "b")])
    yield made
    for replica in made:
        replica.close()


@pytest.fixture(scope="module", params=["ipc", "gloo"])
def house(request: pytest.FixtureRequest, replicas: list[RemoteReplica]) -> Iterator[House]:
    house = House(replicas, request.param)
    yield house
    house.close()


def test_tokens_are_those_of_an_engine_in_one_process(house: House) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    version = house.trainer.become(seed)
    assert house.manager().sync(version).ending is Ending.COMMITTED
    requests = make_requests(24, seed, samples=2, temperature=0.9, stop_token_ids=(3,))
    ears = [Ear(replica) for replica in house.replicas]
    halves = requests[::2], requests[1::2]
    for replica, half in zip(house.replicas, halves, strict=True):
        assert replica.serving == version
        replica.submit(half)
    outputs = sorted(
        (o for ear, half in zip(ears, halves, strict=True) for o in ear.take(len(half))), key=lambda o: o.key
    )
    assert_same(outputs, alone(house.trainer.model, requests, version=version))
    assert {(s.version, s.replica) for o in outputs for s in o.segments} == {(version, "a"), (version, "b")}
    sent = {name: described(name, p) for name, p in house.trainer.per_tensor_params()}
    assert [replica.digests(None, Deadline(20)) for replica in house.replicas] == [sent, sent]
    assert [replica.unfinished() for replica in house.replicas] == [[], []]
