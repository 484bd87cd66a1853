"""A live vLLM engine takes new weights through the sync manager: log-probs as transformers', bits as they were sent."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.process import run_token
from rlctl.rollout.vllm.handles import LLMHandle
from rlctl.rollout.vllm.replica import VllmReplica
from rlctl.sync.engine import EngineOptions
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.member import described
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.report import SyncError
from rlctl.sync.states import Ending
from rlctl.sync.worker_process import WorkerProcesses
from tests.rollout.vllm.tiny_engines import PROMPT, TinyModel, engine_arguments, say, vllm_environment
from tests.sync.squad import runnable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class House:
    """A trainer in this process, a checkpoint-engine worker, and a vLLM engine in this process behind it."""

    def __init__(self, folder: Path) -> None:
        import vllm

        self.model = TinyModel()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model.model.save_pretrained(folder)
        self.llm = vllm.LLM(**engine_arguments(folder))
        self.handle = LLMHandle(self.llm)
        self.replica = VllmReplica(self.handle, "one")
        self.options = EngineOptions(bucket_size=64 << 10, timeout=60.0, token=run_token())
        self.host = SourceHost(self.model)
        self.workers = WorkerProcesses("gloo", self.options)
        self.workers.join("one", self.replica.loaders)
        self.backend = ""
        self.version = 0

    def manager(self, backend: str, **policy: Any) -> SyncManager:
        if backend != self.backend:
            self.host.open(backend, "trainer", 0, 1, asdict(self.options))
            self.workers._backend = backend
            self.workers.open(60)
            self.backend = backend
        trainers = LocalMembers([LocalMember("trainer 0", self.host)])
        policy = {"timeout": 60.0, **policy}
        return SyncManager(trainers, self.workers, [self.replica], engine=backend, policy=SyncPolicy(**policy))

    def change(self) -> int:
        self.version += 1
        self.model.become(self.version)
        return self.version

    def assert_serves_the_model(self) -> None:
        with self.handle.batch(timeout=10) as llm:
            tokens, logprobs, cached = say(llm)
            assert cached == 0
            torch.testing.assert_close(logprobs, self.model.logprobs(PROMPT, tokens), atol=1e-5, rtol=0)
            again, logprobs, cached = say(llm)
        assert (again, cached) == (tokens, 128)  # it is in the cache now, to be stale after the next update
        torch.testing.assert_close(logprobs, self.model.logprobs(PROMPT, tokens), atol=1e-5, rtol=0)
        assert self.replica.digests() == [{n: described(n, t) for n, t in self.model.tensors().items()}]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("vllm")
    with vllm_environment(folder / "path"):
        house = House(folder / "model")
        yield house
        house.workers.close()
        house.host.close()


def test_the_plugin_did_all_it_wanted(house: House) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from rlctl.rollout.vllm import plugin

    assert plugin.problems == {}
    assert entry_points(group="vllm.general_plugins")["rlctl"].load() is plugin.register
    for factory in (WeightTransferEngineFactory, WeightTransferTrainerFactory):
        assert {f"rlctl-{name}" for name in CHECKPOINT_ENGINES.names()} <= set(factory._registry)


@pytest.mark.parametrize("commit", ["inplace", "staged"])
@pytest.mark.parametrize("backend", CHECKPOINT_ENGINES.names())
def test_new_weights_are_served(house: House, backend: str, commit: str) -> None:
    runnable(backend)
    manager = house.manager(backend, commit=commit)
    for _ in range(2):
        version = house.change()
        assert manager.sync(version).ending is Ending.COMMITTED
        assert house.replica.serving == version
        house.assert_serves_the_model()


def test_a_tensor_left_out_and_one_too_many_are_named(house: House) -> None:
    manager = house.manager("gloo", attempts=1)
    manager.sync(house.change())
    cases: list[tuple[set[str], dict[str, torch.Tensor], str]] = [
        ({"model.layers.1.self_attn.k_proj.weight"}, {}, r"untouched 1 \(model.layers.1.self_attn.k_proj.weight\)"),
        (set(), {"model.layers.7.mlp.up_proj.weight": torch.ones(3)}, r"unknown 1, .*model.layers.7.mlp.up_proj"),
    ]
    for left_out, added, message in cases:
        house.model.leave_out, house.model.add = left_out, added
        try:
            with pytest.raises(SyncError, match=message):
                manager.sync(house.change())
        finally:
            house.model.leave_out, house.model.add = set(), {}
        assert house.replica.serving is None
        with pytest.raises(RlctlError, match="does not serve"), house.handle.batch(timeout=0.1):
            pass
        manager.sync(house.change())
        house.assert_serves_the_model()


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_damage_fences_or_keeps_and_the_next_sync_heals(house: House, commit: str) -> None:
    manager = house.manager("gloo", commit=commit, attempts=1)
    good = house.change()
    manager.sync(good)
    before = house.replica.digests()
    house.host.inject({"kind": "flip", "at": 1})
    with pytest.raises(SyncError, match="did not arrive as it was sent"):
        manager.sync(house.change())
    assert house.replica.serving == (good if commit == "staged" else None)
    if commit == "staged":
        assert house.replica.digests() == before
        house.model.become(good)
        house.assert_serves_the_model()
    manager.sync(house.change())
    house.assert_serves_the_model()


def test_chosen_tensors_are_read_back(house: House) -> None:
    manager = house.manager("gloo")
    manager.sync(house.change())
    name = "model.layers.0.self_attn.v_proj.weight"
    tensor = house.model.tensors()[name].detach()
    ((region,),) = house.replica.read(name)
    assert region == [[[0, 32], [0, 64]], "F32", tensor.numpy().tobytes()]
    assert house.replica.digests([name]) == [{name: described(name, tensor)}]
    with pytest.raises(RlctlError, match=r"no tensor model\.nothing"):
        house.replica.read("model.nothing")


def test_the_cache_gives_its_memory_back(house: House) -> None:
    manager = house.manager("gloo")
    manager.sync(house.change())
    house.assert_serves_the_model()
    (held,) = house.llm.collective_rpc("rlctl_release_kv")
    (gone,) = house.llm.collective_rpc("rlctl_release_kv")
    (back,) = house.llm.collective_rpc("rlctl_restore_kv")
    from rlctl.rollout.vllm.extension import decoded

    assert [decoded(a) for a in (held, gone, back)] == [16 << 20, 0, 16 << 20]
    house.llm.reset_prefix_cache()
    house.assert_serves_the_model()
