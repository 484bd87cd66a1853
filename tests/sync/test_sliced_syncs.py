"""Whole syncs of replicas of several ranks, each of which gets its slices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, get_args

import pytest
import torch

from rlctl.errors import UsageError
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.inlet import LoadOrder, WeightInlet
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.member import described
from rlctl.sync.member_process import MemberProcess
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.protocols import LoadReport
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.report import SyncError, SyncReport
from rlctl.sync.slicing import Layouts
from rlctl.sync.states import Commit, Ending
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.sync.traits import BACKEND_TRAITS
from rlctl.sync.worker_process import WorkerProcesses
from tests.conftest import OPTIONAL
from tests.sync.sliced_models import (
    Tensors,
    blank_shards,
    engine_shards,
    layouts_of,
    random_config,
    trainer_shards,
    whole_model,
)
from tests.sync.squad import TWO_SIDED, Pool, Served, runnable
from tests.sync.wire_cases import assert_same

CONFIG: dict[str, Any] = random_config(random.Random(3)) | {"num_key_value_heads": 1, "vocab_size": 67}
SLICING = [name for name in TWO_SIDED if BACKEND_TRAITS[name].delivery == "slices"]


class Fleet:
    """Two trainer ranks and two replicas of two ranks each, in processes, under a manager."""

    def __init__(self, pool: Pool, backend: str, **policy: Any) -> None:
        self.layouts = layouts_of(CONFIG, ParallelLayout.fsdp(2), 2)
        options = EngineOptions(
            bucket_size=4096,
            timeout=20.0,
            token="slices",  # noqa: S106
            layouts=self.layouts,
        )
        trainers, rollouts = pool.take(2, 4)
        for place, member in enumerate(rollouts):
            member.replica, member.part = f"replica {place // 2}", place % 2
        self.trainers = MemberProcesses("trainer", trainers, backend, options)
        self.rollouts = MemberProcesses("rollout", rollouts, backend, options)
        for group in (self.trainers, self.rollouts):
            group.open(60)
        self.for_each = backend != "file"
        self.serves_late = CHECKPOINT_ENGINES.load(backend).serves_late
        self.served = [Served(rollouts[0]), Served(rollouts[2])]
        for place, member in enumerate(rollouts):
            arguments = {"config": CONFIG, "tp": 2, "part": place % 2}
            self.load(member, "tests.sync.sliced_models:engine_of", arguments)
        self.manager = SyncManager(
            self.trainers, self.rollouts, self.served,
            engine=backend, policy=SyncPolicy(**{"timeout": 20.0, **policy}),
        )  # fmt: skip

    def load(self, member: MemberProcess, factory: str, arguments: dict[str, Any]) -> None:
        member.ask("load", {"factory": factory, "arguments": arguments}, Deadline(60))

    def sync(self, version: int) -> SyncReport:
        for rank, member in enumerate(self.trainers.members):
            arguments = {"config": CONFIG, "shard": 2, "tp": 2, "rank": rank, "seed": 0, "content": version}
            self.load(member, "tests.sync.sliced_models:trainer_of", arguments)
        return self.manager.sync(version)

    def assert_serves(self, replica: int, version: int) -> None:
        full = whole_model(self.layouts, 1000 * version)
        assert self.served[replica].serving == version
        for part in range(2):
            held = self.rollouts.members[2 * replica + part].ask("digest", {}, Deadline(20))
            due = engine_shards(CONFIG, full, 2, part)
            assert held == {name: described(name, due[name]) for name in held}


@pytest.fixture
def fleet(pool: Pool, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    backend, commit = request.param
    runnable(backend)
    made = Fleet(pool, backend, commit=commit)
    yield made
    for member in made.rollouts.members:
        member.replica, member.part = member.name, 0


CASES = [
    pytest.param((name, commit), id=f"{name}-{commit}", marks=[getattr(pytest.mark, name)] if name in OPTIONAL else [])
    for name in SLICING
    if name not in ("nccl", "hccl")
    for commit in get_args(Commit)
]


@pytest.mark.parametrize("fleet", CASES, indirect=True)
def test_replicas_of_two_ranks_are_synced(fleet: Fleet) -> None:
    for version in (1, 2, 3):
        report = fleet.sync(version)
        assert (report.ending, report.delivery, report.attempts) == (Ending.COMMITTED, "slices", 1)
        for replica in range(2):
            fleet.assert_serves(replica, version)
        transfers = {(t.tensor, t.box, t.dst * fleet.for_each): t.nbytes for t in fleet.layouts.plan.transfers()}
        # Once for both replicas, and by a file once for all of their ranks.
        assert 0 <= report.bytes - sum(transfers.values()) < 256 * 2 * report.tensors

    fleet.trainers.members[1].ask("inject", {"fault": {"kind": "flip", "at": 1}}, Deadline(5))
    assert fleet.sync(4).attempts == 2
    fleet.assert_serves(0, 4)
    fleet.assert_serves(1, 4)

    fleet.trainers.members[0].ask("inject", {"fault": {"kind": "missing_name", "at": 2}}, Deadline(5))
    with pytest.raises(SyncError, match=r"untouched \d+ \(.*\[\d+:\d+") as refused:
        fleet.sync(5)
    assert bool(refused.value.fenced) == (fleet.manager.fenced != {})
    assert fleet.sync(6).ending is Ending.COMMITTED
    fleet.assert_serves(1, 6)

    fleet.manager.lost("replica 1", "restarted")
    reports = fleet.manager.catch_up()
    assert [r.ending for r in reports.values()] == ([Ending.COMMITTED] if fleet.serves_late else [])
    if fleet.serves_late:
        fleet.assert_serves(1, 6)


class Trainer:
    """A trainer's side with shards: the only rank, which holds everything."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        self.full: Tensors = {}

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("nothing is gathered")

    def local_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from trainer_shards(self.layouts, self.full, 0).items()

    def offload(self) -> None: ...


class Inference:
    """An inference process that happens to be this one."""

    def __init__(self, layouts: Layouts, part: int, shards: Tensors) -> None:
        self.shards, self.inlet = shards, WeightInlet("slices")
        self.places = layouts.targets(part, shards)

    def targets(self) -> Mapping[str, TensorMeta]:
        return {name: TensorMeta.of(name, place) for name, place in self.places.items()}

    def load(self, order: LoadOrder, deadline: Deadline) -> LoadReport:
        return self.inlet.into(order, self.places, deadline)


class Engine:
    """A replica that serves nothing."""

    replica = "one"

    def interrupt(self, how: str, version: int, deadline: Deadline) -> None: ...

    release_kv = restore_kv = resume = fence = lambda *_: None


def test_a_worker_for_each_rank_of_a_replica() -> None:
    layouts = layouts_of(CONFIG, ParallelLayout.fsdp(1), 2)
    options = EngineOptions(bucket_size=4096, timeout=20.0, token="slices", layouts=layouts)  # noqa: S106
    trainer = Trainer(layouts)
    host = SourceHost(trainer)
    host.open("gloo", "trainer", 0, 1, asdict(options))
    processes = [Inference(layouts, p, blank_shards(CONFIG, whole_model(layouts, 0), 2, p)) for p in range(2)]
    workers = WorkerProcesses("gloo", options)
    with pytest.raises(UsageError, match="1 inference processes, and its layout 2 ranks"):
        workers.join("one", processes[:1])
    workers.join("one", processes)
    workers.open(60)
    try:
        for version, commit in enumerate(get_args(Commit)):
            trainer.full = whole_model(layouts, version)
            policy = SyncPolicy(timeout=20.0, commit=commit)
            trainers = LocalMembers([LocalMember("trainer 0", host)])
            report = SyncManager(trainers, workers, [Engine()], engine="gloo", policy=policy).sync(version)
            assert (report.ending, report.delivery) == (Ending.COMMITTED, "slices")
            for part, process in enumerate(processes):
                due = engine_shards(CONFIG, trainer.full, 2, part)
                assert_same({name: due[name] for name in process.shards}, process.shards)
    finally:
        for process in processes:
            process.inlet.close()
        workers.leave("one")
        workers.close()
        host.close()
