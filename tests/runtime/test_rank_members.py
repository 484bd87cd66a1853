"""The trainer's ranks as the sending side of weight syncs, in real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from rlctl.model.loading import LoadedModel, load_model
from rlctl.model.memory_settings import Memory
from rlctl.ops.inputs import find_inputs
from rlctl.ops.resolve import resolve
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.rollout.served import ServedEngine
from rlctl.runtime.ranks.engine import RankedEngine
from rlctl.runtime.ranks.members import RankMembers
from rlctl.runtime.ranks.starting import start_ranks
from rlctl.runtime.ranks.supervisor import RankError
from rlctl.schema import Config
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.manager import SyncManager
from rlctl.sync.member import described
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.report import SyncError
from rlctl.sync.worker_process import WorkerProcesses

SECONDS = 60.0


class Pair:
    """Trainer ranks, and an engine of this process behind a worker."""

    def __init__(self, stack: ExitStack, folder: Path, ranks: int, dtype: str = "float32") -> None:
        self.config: Config = resolve(
            env={},
            overrides=[
                f"placement.trainer_ranks={ranks}", f"cluster.devices_per_node={ranks}", "run.threads=1",
                f"model.dtype={dtype}",
            ],
        ).config  # fmt: skip
        self.loaded: LoadedModel = load_model(find_inputs(self.config).model, trust_remote_code=False)
        self.model: RankedEngine = start_ranks(
            self.config,
            self.loaded.model.config,
            self.loaded.source,
            total_updates=1,
            memory=Memory(),
            logs=folder,
            stack=stack,
            noted=dtype == "bfloat16",
        )
        options = EngineOptions(bucket_size=1 << 20, timeout=SECONDS, token="members")  # noqa: S106
        self.ranks = RankMembers(self.model.ranks)
        self.ranks.open("ipc", options, Deadline(SECONDS))
        kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self.served = ServedEngine(
            EmbeddedEngine(self.loaded.model.config, dtype=kind, max_length=64, replica="one"), options.token
        )
        workers = WorkerProcesses("ipc", options)
        stack.callback(workers.close)
        workers.join("one", [self.served])
        workers.open(SECONDS)
        self.manager = SyncManager(self.ranks, workers, [self.served], engine="ipc", policy=SyncPolicy(timeout=SECONDS))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("ranks", "dtype"), [pytest.param(1, "float32", marks=pytest.mark.new_interpreters), (2, "bfloat16")]
)
def test_an_engine_gets_what_the_ranks_hold_and_one_that_was_killed_is_named(stack, tmp_path, ranks, dtype):
    pair = Pair(stack, tmp_path, ranks, dtype)
    prepared = pair.ranks.start("prepare", {0: {"timeout": SECONDS, "rank": 0, "world": 1}}, Deadline(SECONDS))
    assert prepared[0].result(SECONDS)["bases"] == {}
    pair.ranks.cancel([0])  # it goes on
    for version in (0, 1):
        report = pair.manager.sync(version)
        assert report.committed == ["one"]
    held = {name: described(name, tensor) for name, tensor in pair.model.per_tensor_params()}
    assert pair.served.digests() == held
    assert pair.model.sent() == ({} if dtype == "float32" else held)
    # In processes of their own the ranks have, bit for bit, what the model is here.
    loaded = dict(pair.loaded.model.named_parameters())
    assert all(
        torch.equal(tensor, loaded[name].detach().to(tensor.dtype)) for name, tensor in pair.model.per_tensor_params()
    )
    last = ranks - 1
    os.kill(pair.model.ranks.pids[last], signal.SIGKILL)
    with pytest.raises(SyncError, match=f"trainer rank {last} has ended"):
        pair.manager.sync(2)
    with pytest.raises(RankError, match=f"trainer rank {last} of {ranks} died in the sync to version 2: SIGKILL"):
        pair.model.ranks.require_alive("the sync to version 2")
