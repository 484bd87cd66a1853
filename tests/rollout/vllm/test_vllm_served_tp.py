"""A vLLM replica of two tensor-parallel workers, each a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlctl.sync.deadline import Deadline
from rlctl.sync.member import described
from tests.rollout.vllm.served_house import ServedHouse
from tests.waiting import until

# vLLM takes three quarters of a minute to start its processes.
SHARED = Path("/dev/shm")  # noqa: S108
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHouse]:
    before = set(SHARED.glob("vllm_dist_*"))  # of other engines
    house = ServedHouse(tmp_path_factory.mktemp("vllm"), tensor_parallel=2)
    try:
        assert not set(SHARED.glob("vllm_dist_*")) - before
        yield house
    finally:
        house.close()


def test_two_workers_serve_what_they_are_sent(house: ServedHouse) -> None:
    assert len(house.replica.loaders) == 2
    house.sync()
    house.assert_serves()
    request = house.request(300)
    house.replica.submit([request])
    house.wait_for_tokens(request)
    house.sync(interruption="keep")
    (output,) = house.outputs(request)
    made = len(output.segments[0].token_ids)
    assert len(output.segments) == 2 and house.gap(request, output)[made:].max() < 1e-5
    house.assert_serves()
    due = {name: described(name, tensor) for name, tensor in house.model.tensors().items()}
    assert house.replica.digests(None, Deadline(60)) == due
    house.replica.sleep(2, Deadline(20))
    house.replica.wake(("weights", "kv_cache"), Deadline(20))
    house.sync()
    house.assert_serves()


def test_the_death_of_one_worker_is_that_of_the_replica(house: ServedHouse) -> None:
    house.sync()
    request = house.request(300)
    house.replica.submit([request])
    house.wait_for_tokens(request)
    processes = house.engine_pids()
    assert len(processes) == 3
    begin = time.monotonic()
    os.kill(max(processes), signal.SIGKILL)
    until(lambda: house.losses, "the loss")
    print(house.losses, time.monotonic() - begin)
    assert "engine process of replica one is gone" in house.losses[0]
    until(lambda: not any(psutil.pid_exists(pid) for pid in processes), "the end of all of them")
