"""Two tensor-parallel workers, each in a process of its own, take their parts of the weights."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from rlctl.sync.report import SyncError
from tests.rollout.vllm.house import House
from tests.rollout.vllm.tiny_engines import TinyModel, vllm_environment

# vLLM takes three quarters of a minute to start its processes.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", params=["Qwen2", "Qwen3Moe"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("vllm")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "Moe" in request.param else {}
    with vllm_environment(folder / "path"):
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
        house = House(folder / "model", TinyModel(kind=request.param, **sizes), tensor_parallel_size=2)
        yield house
        house.close()


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_each_worker_takes_its_part(house: House, commit: str) -> None:
    manager = house.manager("ipc", commit=commit, attempts=1)
    in_place = not hasattr(house.model.model.config, "num_experts")
    for _ in range(2):
        manager.sync(house.change())
        house.assert_serves_the_model(readable=False)
        for name, tensor in house.model.tensors().items() if in_place else ():
            for regions in house.replica.read(name):
                for box, _, data in regions:
                    part = tensor.detach()[tuple(slice(*span) for span in box)].contiguous()
                    assert data == part.numpy().tobytes(), name
    house.model.leave_out, house.model.add = {"model.norm.weight"}, {"model.layers.9.bias": torch.ones(1)}
    try:
        with pytest.raises(SyncError, match=r"unknown 1, untouched 1 \(model.layers.9.bias, model.norm.weight\)"):
            manager.sync(house.change())
    finally:
        house.model.leave_out, house.model.add = set(), {}
    manager.sync(house.change())
    house.assert_serves_the_model(readable=False)
