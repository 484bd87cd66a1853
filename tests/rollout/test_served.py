"""The embedded engine under the sync manager: requests interrupted in three ways, weights through a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.rollout.served import ServedEngine
from rlctl.sync.engine import EngineOptions
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.member import described
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.report import SyncError
from rlctl.sync.states import Ending
from rlctl.sync.worker_process import WorkerProcesses
from tests.rollout.tiny import FUSED, VOCAB, make_model

OPTIONS = EngineOptions(bucket_size=16 << 10, timeout=20.0, token="served")  # noqa: S106


LONG = 150


def request(ordinal: int, tokens: int) -> Request:
    return Request(RequestKey(ordinal, 0), tuple(range(VOCAB))[:9], SamplingParams(max_new_tokens=tokens), seed=7)


class Trainer:
    """A model that changes."""

    def __init__(self) -> None:
        self.model = make_model(FUSED["qwen2"], seed=70)
        self.leave_out = ""

    def become(self, seed: int) -> int:
        self.model = make_model(FUSED["qwen2"], seed=seed)
        return seed

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((n, p.detach()) for n, p in self.model.named_parameters() if n != self.leave_out)

    def offload(self) -> None:
        raise AssertionError("nothing is colocated here")


class House:
    """A trainer, a worker, and an engine that a thread of its own decodes with."""

    def __init__(self) -> None:
        self.trainer = Trainer()
        self.host = SourceHost(self.trainer)
        self.host.open("gloo", "trainer", 0, 1, asdict(OPTIONS))
        engine = EmbeddedEngine(FUSED["qwen2"], dtype=torch.float32, max_length=256, replica="one")
        self.served = ServedEngine(engine, OPTIONS.token)
        self.workers = WorkerProcesses("gloo", OPTIONS)
        self.workers.join("one", [self.served])
        self.workers.open(60)
        self.outputs: list[Output] = []
        self.over = False
        self.thread = threading.Thread(target=self.decode)
        self.thread.start()

    def decode(self) -> None:
        while not self.over:
            self.outputs += self.served.step(timeout=0.05)
            time.sleep(0.003)  # so that a sync finds a request at work

    def manager(self, **policy: Any) -> SyncManager:
        trainers = LocalMembers([LocalMember("trainer 0", self.host)])
        policy = {"timeout": 20.0, **policy}
        return SyncManager(trainers, self.workers, [self.served], engine="gloo", policy=SyncPolicy(**policy))

    def next(self) -> Output:
        limit = time.monotonic() + 20
        while not self.outputs:
            assert time.monotonic() < limit
            time.sleep(0.005)
        return self.outputs.pop(0)

    def assert_holds_the_model(self) -> None:
        sent = {n: described(n, p.detach()) for n, p in self.trainer.model.named_parameters()}
        assert self.served.digests() == sent

    def close(self) -> None:
        self.over = True
        self.thread.join()
        self.workers.close()
        self.host.close()
        self.served.close()


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


@pytest.mark.parametrize("commit", ["inplace", "staged"])
@pytest.mark.parametrize("how", ["abort", "keep", "wait"])
def test_a_request_lives_through_a_sync(house: House, how: str, commit: str) -> None:
    manager = house.manager(commit=commit, interruption=how)
    first = house.trainer.become(71)
    manager.sync(first)
    house.assert_holds_the_model()
    house.served.submit([request(0, LONG)])
    time.sleep(0.03)
    assert manager.sync(house.trainer.become(73)).ending is Ending.COMMITTED
    house.assert_holds_the_model()
    output = house.next()
    versions = [segment.version for segment in output.segments]
    assert versions == {"abort": [71], "keep": [71, 73], "wait": [71]}[how], versions
    assert output.finish_reason == ("abort" if how == "abort" else "length")
    assert (len(output.token_ids) < LONG) == (how == "abort")
    house.served.submit([request(1, 4)])
    assert [segment.version for segment in house.next().segments] == [73]


def test_a_tensor_left_out_is_named_and_nothing_is_decoded(house: House) -> None:
    manager = house.manager(attempts=1, interruption="keep")
    manager.sync(house.trainer.become(75))
    house.trainer.leave_out = "model.norm.weight"
    try:
        with pytest.raises(SyncError, match=r"untouched 1 \(model.norm.weight\)"):
            manager.sync(house.trainer.become(76))
    finally:
        house.trainer.leave_out = ""
    assert house.served.serving is None
    house.served.submit([request(2, 4)])
    time.sleep(0.1)
    assert not house.outputs
    manager.sync(house.trainer.become(78))
    assert [segment.version for segment in house.next().segments] == [78]
    with pytest.raises(RlctlError, match=r"no tensor model\.nothing"):
        house.served.digests(["model.nothing"])
