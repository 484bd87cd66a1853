"""A trainer in the test's process, replicas in processes of their own, and the workers that bring them weights."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.experience.segments import RequestKey
from rlctl.process import Child, start
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.rollout.client import ReplicaClient
from rlctl.rollout.remote.replica import RemoteReplica
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.errors import DeadlineError, ReplicaLostError
from rlctl.sync.inlet import LoadOrder
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.protocols import LoadReport
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.sync.worker_process import WorkerProcesses
from tests.rollout.tiny import FUSED, VOCAB, finish, make_engine, make_model, make_requests
from tests.waiting import until

TOKEN = "replicas"  # noqa: S105
OPTIONS = EngineOptions(bucket_size=16 << 10, timeout=30.0, token=TOKEN)
CONFIG = FUSED["qwen2"]
SECONDS = 60.0
START_SECONDS = 200.0  # a process imports for seconds, and others may have the processors
BAD_KEY = RequestKey(99, 0)  # of a request that no engine serves


def a_seed() -> int:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    return seed


def setup_of(folder: Path, name: str, **more: Any) -> ReplicaSetup:
    """Return the setup of a replica of the tiny model."""
    CONFIG.save_pretrained(folder)
    given = {"engine": "paced", "dtype": "float32", "max_slots": 4, "max_length": 256, "threads": 1, **more}
    return ReplicaSetup(source=str(folder), replica=name, token=TOKEN, **{"progress_ticks": 5, **given})


def start_paced(target: str, **more: Any) -> Child:
    """A ``Start`` of processes that know the paced engine."""
    assert target == "rlctl.rollout.remote.process:serve"
    return start("tests.rollout.remote.paced:serve", **more)


def long_requests(count: int, seed: int, **params: Any) -> list[Request]:
    """Return requests long enough that a sync, or a death, finds them under way."""
    requests = make_requests(count, seed, longest=50, **params)
    return [replace(r, params=replace(r.params, max_new_tokens=r.params.max_new_tokens + 120)) for r in requests]


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
        until(lambda: len(self.outputs) >= count, f"{count} outputs")
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


class Deadly:
    """A replica's loader; when armed, the process is killed as its load begins."""

    def __init__(self, client: RemoteReplica) -> None:
        self.client = client
        self.armed = False

    def targets(self) -> Mapping[str, TensorMeta]:
        return self.client.loaders[0].targets()

    def load(self, order: LoadOrder, deadline: Deadline) -> LoadReport:
        if self.armed:
            self.armed = False
            os.kill(self.client.pid, signal.SIGKILL)
        return self.client.loaders[0].load(order, deadline)


class House:
    """See the module. The replicas are begun already."""

    def __init__(
        self,
        replicas: Sequence[RemoteReplica],
        backend: str,
    ) -> None:
        self.backend = backend
        self.trainer = Trainer()
        self.host = SourceHost(self.trainer)
        self.host.open(backend, "trainer", 0, 1, asdict(OPTIONS))
        self.replicas = list(replicas)
        self.deadly = {replica.replica: Deadly(replica) for replica in replicas}
        self.workers = WorkerProcesses(backend, OPTIONS)
        for replica in replicas:
            self.workers.join(replica.replica, [self.deadly[replica.replica]])
        self.workers.open(START_SECONDS)

    def manager(self, **policy: Any) -> SyncManager:
        trainers = LocalMembers([LocalMember("trainer 0", self.host)])
        policy = {"timeout": 30.0, **policy}
        return SyncManager(trainers, self.workers, self.replicas, engine=self.backend, policy=SyncPolicy(**policy))

    def close(self) -> None:
        self.workers.close()
        self.host.close()


def begun(setups: Sequence[ReplicaSetup], **more: Any) -> list[RemoteReplica]:
    """Return replicas whose processes were started at once."""
    replicas = [RemoteReplica(setup, start_paced, **more) for setup in setups]
    for future in [call(lambda r=r: r.begin(Deadline(START_SECONDS)), "begin") for r in replicas]:
        future.result()
    return replicas


def strike(client: RemoteReplica, how: str) -> str:
    """Have a replica die; return what is said of it."""
    if how == "killed":
        os.kill(client.pid, signal.SIGKILL)
        return "SIGKILL"
    if how == "stopped":
        os.kill(client.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises((DeadlineError, ReplicaLostError)):
            client.digests(None, Deadline(0.2))
        assert time.monotonic() - begin < 10
        return "it has said nothing for 3 s, and was killed"
    client.submit([Request(BAD_KEY, (VOCAB,), SamplingParams(1), seed=1)])
    return f"request {tuple(BAD_KEY)}: a token id is outside"


def alone(model: Any, requests: Sequence[Request], *, version: int) -> list[Output]:
    """Return what one engine in this process makes of requests, sorted by key."""
    engine = make_engine(model, load=False, replica="alone")
    engine.load_weights(model.state_dict().items(), version)
    engine.submit(requests)
    return sorted(finish(engine), key=lambda output: output.key)


def assert_told_true(outputs: Sequence[Output], requests: Sequence[Request], models: Mapping[int, Any]) -> None:
    """Every segment has the tokens, and log-probs, that one engine makes of the request under the segment's version."""
    by_key = {request.key: request for request in requests}
    assert sorted(by_key) == sorted(output.key for output in outputs)
    for place in range(max(len(output.segments) for output in outputs)):
        for version, model in models.items():
            here = [o for o in outputs if len(o.segments) > place and o.segments[place].version == version]
            parts = []
            for output in here:
                request, made = by_key[output.key], sum(len(s.token_ids) for s in output.segments[: place + 1])
                params = replace(request.params, max_new_tokens=made)
                parts.append(replace(request, params=params, prefix=tuple(output.segments[:place])))
            found = {output.key: output for output in alone(model, parts, version=version)}
            for output in here:
                segment, same = output.segments[place], found[output.key]
                assert segment.token_ids == same.token_ids[-len(segment.token_ids) :], (output.key, place)
                assert segment.logprobs == same.logprobs[-len(segment.token_ids) :], (output.key, place)
    for output in outputs:
        assert {s.version for s in output.segments} <= set(models)
        assert len(output.token_ids) <= by_key[output.key].params.max_new_tokens


def assert_same(outputs: Sequence[Output], expected: Sequence[Output]) -> None:
    """Tokens, log-probs and endings are equal, bit for bit."""
    assert [o.key for o in outputs] == [o.key for o in expected]
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.token_ids == wanted.token_ids, output.key
        assert output.logprobs == wanted.logprobs, output.key
        assert output.finish_reason == wanted.finish_reason, output.key
