"""Replicas that decode when they are told to: one in a process of its own beside one in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.rollout.base import Output
from rlctl.rollout.local_replica import LocalReplica
from rlctl.rollout.served import ServedEngine
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import ReplicaLostError
from tests.rollout.remote.house import TOKEN, House, a_seed, begun, setup_of
from tests.rollout.tiny import make_engine, make_requests


@pytest.mark.slow
def test_lockstep_is_the_same_tick_by_tick_here_and_there(tmp_path: Path) -> None:
    (there,) = begun([setup_of(tmp_path, "in step", lockstep=True)])
    house = House([there], "ipc")
    version = house.trainer.become(seed := a_seed())
    house.manager().sync(version)
    engine = make_engine(house.trainer.model, load=False, replica="in step", max_slots=4)
    here = LocalReplica(ServedEngine(engine, TOKEN), max_length=256, lockstep=True)
    engine.load_weights(house.trainer.model.state_dict().items(), version)
    here.resume(version, Deadline(20))
    requests = make_requests(20, seed)
    told: list[list[list[Output]]] = []
    for client in (here, there):
        client.submit(requests[:12])
        ticks = [client.tick(Deadline(20)) for _ in range(9)]
        client.submit(requests[12:])
        client.abort([requests[13].key], deadline=Deadline(20))
        while client.unfinished():
            ticks.append(client.tick(Deadline(20)))
        told.append(ticks)
    assert told[0] == told[1]
    assert sum(map(len, told[0])) == 20
    house.close()
    for client in (here, there):
        client.close()
        with pytest.raises(ReplicaLostError, match="closed"):
            client.submit(requests)
