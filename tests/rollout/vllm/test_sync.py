"""A live vLLM engine takes new weights through the sync manager: log-probs as transformers', bits as they were sent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.sync.member import described
from rlctl.sync.report import SyncError
from rlctl.sync.states import Ending
from tests.rollout.vllm.house import House
from tests.rollout.vllm.tiny_engines import TinyModel, vllm_environment
from tests.sync.squad import TWO_SIDED, runnable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("vllm")
    with vllm_environment(folder / "path"):
        house = House(folder / "model", TinyModel())
        yield house
        house.close()


def test_the_plugin_did_all_it_wanted(house: House) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from rlctl.rollout.vllm import plugin

    assert plugin.problems == {}
    assert entry_points(group="vllm.general_plugins")["rlctl"].load() is plugin.register
    for factory in (WeightTransferEngineFactory, WeightTransferTrainerFactory):
        assert {f"rlctl-{name}" for name in TWO_SIDED} <= set(factory._registry)


@pytest.mark.parametrize("commit", ["inplace", "staged"])
@pytest.mark.parametrize("backend", TWO_SIDED)
def test_new_weights_are_served(house: House, backend: str, commit: str) -> None:
    runnable(backend)
    manager = house.manager(backend, commit=commit)
    for _ in range(2):
        version = house.change()
        assert manager.sync(version).ending is Ending.COMMITTED
        assert house.replica.serving == version
        house.assert_serves_the_model()


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_changes_alone_are_enough(house: House, commit: str) -> None:
    manager = house.manager("gloo", delta=True, commit=commit)
    whole = manager.sync(house.change())
    for _ in range(2):
        house.version += 1
        with torch.no_grad():  # a step that changes little
            for tensor in house.model.tensors().values():
                tensor.reshape(-1)[house.version % 7 :: 101] *= 1.5
        report = manager.sync(house.version)
        assert report.ending is Ending.COMMITTED
        assert report.bytes < whole.bytes / 4
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


def test_a_killed_worker_is_replaced_and_the_engine_stays(house: House) -> None:
    manager = house.manager("gloo", commit="staged")
    manager.sync(house.change())
    (worker,) = house.workers.members
    starts = worker.starts
    os.kill(worker.pid, signal.SIGKILL)
    house.assert_serves_the_model()
    manager.sync(house.change())
    assert worker.starts == starts + 1
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
