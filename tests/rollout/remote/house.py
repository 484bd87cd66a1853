"""A trainer in the test's process, replicas in processes of their own, and the workers that bring them weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rlctl.process import start
from rlctl.rollout.base import Output, Request
from rlctl.rollout.client import ReplicaClient
from rlctl.rollout.remote.replica import RemoteReplica
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.worker_process import WorkerProcesses
from tests.rollout.tiny import FUSED, finish, make_engine, make_model

TOKEN = "replicas"  # noqa: S105
OPTIONS = EngineOptions(bucket_size=16 << 10, timeout=30.0, token=TOKEN)
CONFIG = FUSED["qwen2"]
SECONDS = 60.0


def setup_of(folder: Path, name: str, **more: Any) -> ReplicaSetup:
    """Return the setup of a replica of the tiny model."""
    CONFIG.save_pretrained(folder)
    given = {"dtype": "float32", "max_slots": 8, "max_length": 256, "threads": 1, **more}
    return ReplicaSetup(engine="transformers", source=str(folder), replica=name, token=TOKEN, **given)


def wait_until(holds: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, f"not within {seconds} s: {what}"
        time.sleep(0.005)


class Ear:
    """What a replica says."""

    def __init__(self, client: ReplicaClient) -> None:
        self.outputs: list[Output] = []
        self.losses: list[str] = []
        self._lock = threading.Lock()
        client.listen(self._hear, lambda _, reason: self.losses.append(reason))

    def _hear(self, replica: str, outputs: list[Output]) -> None:
        with self._lock:
            self.outputs += outputs

    def take(self, count: int) -> list[Output]:
        """Wait for so many outputs and return them, sorted by key."""
        wait_until(lambda: len(self.outputs) >= count, f"{count} outputs")
        with self._lock:
            outputs, self.outputs = self.outputs, []
        assert len(outputs) == count
        return sorted(outputs, key=lambda output: output.key)


class Trainer:
    """A model that changes."""

    def __init__(self) -> None:
        self.model = make_model(CONFIG, seed=1)

    def become(self, seed: int) -> int:
        self.model = make_model(CONFIG, seed=seed)
        return seed

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def offload(self) -> None:
        raise AssertionError("nothing is colocated here")


class House:
    """See the module. The replicas are begun already."""

    def __init__(self, replicas: Sequence[RemoteReplica], backend: str) -> None:
        self.backend = backend
        self.trainer = Trainer()
        self.host = SourceHost(self.trainer)
        self.host.open(backend, "trainer", 0, 1, asdict(OPTIONS))
        self.replicas = list(replicas)
        self.workers = WorkerProcesses(backend, OPTIONS)
        for replica in replicas:
            self.workers.join(replica.replica, replica.loaders)
        self.workers.open(SECONDS)

    def manager(self, **policy: Any) -> SyncManager:
        trainers = LocalMembers([LocalMember("trainer 0", self.host)])
        policy = {"timeout": 30.0, **policy}
        return SyncManager(trainers, self.workers, self.replicas, engine=self.backend, policy=SyncPolicy(**policy))

    def close(self) -> None:
        self.workers.close()
        self.host.close()


def begun(setups: Sequence[ReplicaSetup], **more: Any) -> list[RemoteReplica]:
    """Return replicas whose processes were started at once."""
    replicas = [RemoteReplica(setup, start, **more) for setup in setups]
    threads = [threading.Thread(target=replica.begin, args=(Deadline(SECONDS),)) for replica in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replicas


def alone(model: Any, requests: Sequence[Request], *, version: int) -> list[Output]:
    """Return what one engine in this process makes of requests, sorted by key."""
    engine = make_engine(model, load=False, replica="alone")
    engine.load_weights(model.state_dict().items(), version)
    engine.submit(requests)
    return sorted(finish(engine), key=lambda output: output.key)


def assert_same(outputs: Sequence[Output], expected: Sequence[Output]) -> None:
    """Tokens, log-probs and endings are equal, bit for bit."""
    assert [o.key for o in outputs] == [o.key for o in expected]
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.token_ids == wanted.token_ids, output.key
        assert output.logprobs == wanted.logprobs, output.key
        assert output.finish_reason == wanted.finish_reason, output.key
