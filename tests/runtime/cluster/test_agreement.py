"""A replica that took an update and does not compute with it: told by log-probs in float32, by digests in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pytest
import torch

from rlctl.experience.segments import RequestKey
from rlctl.model.local import LocalEngine
from rlctl.rollout.base import LoadReport, Output, Request, SamplingParams
from rlctl.rollout.embedded.decoder import Prefix
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.rollout.local_replica import LocalReplica
from rlctl.rollout.served import ServedEngine
from rlctl.runtime.cluster.agreement import DigestAgreement, LogProbAgreement
from rlctl.runtime.cluster.probed_replica import PROBES, Agreement, ProbedReplica
from rlctl.runtime.ranks.sending import NotedSource
from rlctl.schema.training import OptimizerConfig
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.report import SyncError
from rlctl.sync.worker_process import WorkerProcesses
from tests.rollout.tiny import FUSED, VOCAB, make_model
from tests.waiting import until

OPTIONS = EngineOptions(bucket_size=64 << 10, timeout=30.0, token="token")  # noqa: S106
CONFIG = FUSED["qwen2"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FaultyEngine(EmbeddedEngine):
    """An engine that does what ``fault`` says with updates, and says that all went well."""

    fault = ""

    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> LoadReport:
        if self.fault == "drops":
            names = [name for name, _ in stream]
            self._version = version
            return LoadReport(names, [], [])
        if self.fault == "adapter twice":
            stream = ((name, self.twice(name, tensor)) for name, tensor in stream)
        report = super().load_weights(stream, version)
        self.before = {name: tensor.clone() for name, tensor in self._awake_weights().items()}
        if self.fault == "stale prefixes":
            kept, prefill = self.prefixes, self._decoder.prefill

            def remembered(sequences: Sequence[tuple[int, ...]]) -> list[Prefix]:
                kept.update({ids: prefill([ids])[0] for ids in sequences if ids not in kept})
                return [kept[ids] for ids in sequences]

            self._decoder.prefill = remembered  # type: ignore[method-assign]
            self.fault = "prefixes are stale from now on"
        return report

    def twice(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The change against the weights before, counted once more: base + 2 x scale x B @ A."""
        before = self.before.get(name)
        return tensor if before is None else tensor + (tensor - before)


class Slow(ServedEngine):
    """Leaves syncs the time to find a request at work."""

    def step(self, timeout: float = 0.0) -> list[Output]:
        ended = super().step(timeout)
        time.sleep(0.003)
        return ended


class House:
    """A trainer here, a checkpoint-engine worker in its process, and an engine behind it that a thread decodes with."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.source = Source()
        host = SourceHost(self.source)
        host.open("gloo", "trainer", 0, 1, asdict(OPTIONS))
        stack.callback(host.close)
        self.members = LocalMembers([LocalMember("trainer 0", host)])
        self.workers = WorkerProcesses("gloo", OPTIONS)
        stack.callback(self.workers.close)
        self.workers.join("one", [Forwarding(self)])
        self.workers.open(60)
        self.client: LocalReplica | None = None

    def furnish(self, dtype: str = "float32") -> None:
        """Begin anew, with an engine and a trainer of a type."""
        self.close()
        self.source.engine = LocalEngine(make_model(CONFIG, seed=70).requires_grad_(True), OptimizerConfig(),
                                         dtype=dtype)  # fmt: skip
        self.source.noted = NotedSource(self.source.engine, noted=dtype != "float32")
        self.engine = FaultyEngine(CONFIG, dtype=DTYPES[dtype], max_length=256, replica="one")
        self.engine.prefixes, self.engine.before = {}, {}
        self.client = LocalReplica(Slow(self.engine, OPTIONS.token), max_length=256)
        agreement: Agreement = DigestAgreement(lambda: self.source.noted.sent)
        if dtype == "float32":
            agreement = LogProbAgreement(
                lambda rows: self.source.engine.log_probs(rows, temperature=1.0),
                vocabulary=VOCAB, max_length=256, seed=5,
            )  # fmt: skip
        self.replica = ProbedReplica(self.client, agreement)
        self.outputs: list[Output] = []
        self.replica.listen(lambda _, ended: self.outputs.extend(ended), lambda *_: None)
        self.manager = SyncManager(
            self.members, self.workers, [self.replica], engine="gloo",
            policy=SyncPolicy(timeout=30.0, interruption="keep"),
        )  # fmt: skip

    def become(self, seed: int) -> None:
        self.source.engine.model.load_state_dict(make_model(CONFIG, seed=seed).state_dict())

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


class Source:
    """The trainer that there is now."""

    engine: LocalEngine
    noted: NotedSource

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.noted.per_tensor_params()

    def offload(self) -> None:
        raise AssertionError("nothing is colocated here")


class Forwarding:
    """The engine that there is now, as a Loader."""

    def __init__(self, house: House) -> None:
        self._house = house

    def targets(self) -> Any:
        return self._house.client.loaders[0].targets()

    def load(self, order: Any, deadline: Deadline) -> LoadReport:
        return self._house.client.loaders[0].load(order, deadline)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with ExitStack() as stack:
        house = House(stack)
        stack.callback(house.close)
        yield house


def test_what_took_all_of_it_agrees_and_probes_reach_nobody(house):
    house.furnish()
    for version in range(4):
        house.become(80 + version)
        assert house.manager.sync(version).committed == ["one"]
        assert house.replica.serving == version
    assert not house.outputs
    assert not house.replica.unfinished()


@pytest.mark.parametrize("fault", ["drops", "stale prefixes", "adapter twice"])
def test_what_took_it_otherwise_is_fenced_and_its_tokens_are_cut_off(house, fault):
    house.furnish()
    house.engine.fault = fault if fault == "stale prefixes" else ""
    house.manager.sync(0)
    house.replica.submit([Request(RequestKey(3, 1), (1, 2, 3), SamplingParams(max_new_tokens=200), seed=5)])
    house.engine.fault = fault if fault != "stale prefixes" else house.engine.fault
    house.become(71)
    with pytest.raises(SyncError, match="one took version 1 and computes otherwise than the trainer: log-probs"):
        house.manager.sync(1)
    assert house.replica.serving is None
    assert house.manager.versions == {"one": None}
    house.replica.abort(deadline=Deadline(10))
    output = until(lambda: house.outputs)[0]
    assert output.finish_reason == "abort"
    assert {segment.version for segment in output.segments} <= {0}
    if fault != "stale prefixes":
        house.engine.fault = ""
        house.become(72)
        house.manager.sync(2)
        assert house.replica.serving == 2


def test_bfloat16_is_read_back(house):
    house.furnish("bfloat16")
    assert house.manager.sync(0).committed == ["one"]
    house.become(71)
    house.engine.fault = "drops"
    with pytest.raises(SyncError, match=r"one took version 1 and holds \d+ of 26 tensors otherwise than they"):
        house.manager.sync(1)
    house.engine.fault = ""
    assert house.manager.sync(2).committed == ["one"]


def test_probes_are_the_same_at_every_sync_and_longer_than_a_block_of_a_prefix_cache(house):
    house.furnish()
    agreement = LogProbAgreement(lambda rows: [], vocabulary=VOCAB, max_length=256, seed=5)
    assert agreement.requests == LogProbAgreement(lambda rows: [], vocabulary=VOCAB, max_length=256, seed=5).requests
    assert max(len(request.prompt_ids) for request in agreement.requests) > 128
    assert all(request.key.ordinal <= PROBES for request in agreement.requests)
    short = LogProbAgreement(lambda rows: [], vocabulary=VOCAB, max_length=8, seed=5).requests
    assert all(len(r.prompt_ids) + r.params.max_new_tokens <= 8 for r in short)
