"""rlctl's checkpoint engines behind vLLM's own update calls, both of its sides."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.rollout.vllm.extension import decoded
from rlctl.sync.engine import EngineOptions
from rlctl.sync.member import described
from tests.rollout.vllm.tiny_engines import PROMPT, TinyModel, end_engine, engine_arguments, say, vllm_environment
from tests.sync.squad import TWO_SIDED, runnable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class Source:
    """vLLM's WeightSource."""

    def __init__(self, model: TinyModel) -> None:
        self.model = model

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.per_tensor_params()


class Client:
    """vLLM's VLLMWeightSyncClient, of an engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


class House:
    """An engine with untied head, and what its trainer sends."""

    def __init__(self, folder: Path) -> None:
        import vllm

        self.model = TinyModel(tied=False, kind="Llama")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model.model.save_pretrained(folder)
        self.llm = vllm.LLM(**engine_arguments(folder, weight_transfer_config={"backend": "rlctl-gloo"}))

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    def use(self, backend: str) -> None:
        """Have vLLM's factory make the engine of another backend, as it does when an engine starts."""
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        worker = self.worker
        worker.weight_transfer_engine.shutdown()
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend), worker.vllm_config, worker.device, worker.model_runner.model
        )

    def trainer(self, backend: str, **more: Any) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from rlctl.rollout.vllm.trainer_engine import RlctlTrainerInit

        self.use(backend)
        options = EngineOptions(bucket_size=64 << 10, timeout=30.0)
        info = RlctlTrainerInit(rank=0, backend=backend, options=options, **more)
        return WeightTransferTrainerFactory.trainer_init(info, client=Client(self.llm), source=Source(self.model))

    def assert_serves_the_model(self) -> None:
        for cached in (0, 128):
            tokens, logprobs, hit = say(self.llm)
            assert hit == cached
            torch.testing.assert_close(logprobs, self.model.logprobs(PROMPT, tokens), atol=1e-5, rtol=0)
        held = decoded(self.llm.collective_rpc("rlctl_digests")[0])
        assert held == {n: described(n, t) for n, t in self.model.tensors().items()}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("vllm")
    with vllm_environment(folder / "path"):
        house = House(folder / "model")
        yield house
        end_engine(house.llm)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("backend", TWO_SIDED)
def test_vllms_calls_bring_the_weights(house: House, backend: str, staged: bool) -> None:
    runnable(backend)
    trainer = house.trainer(f"rlctl-{backend}", staged=staged)
    for seed in (1, 2):
        house.model.become(seed)
        trainer.send_weights()
        assert house.llm.get_weight_version() == str(trainer.version) == str(seed)
        house.assert_serves_the_model()
    trainer.shutdown()


def test_a_rank_that_does_not_send_runs_its_gathers(house: House) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from rlctl.rollout.vllm.trainer_engine import RlctlTrainerInit

    taken: list[str] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in house.model.per_tensor_params():
            taken.append(name)
            yield name, tensor

    trainer = WeightTransferTrainerFactory.trainer_init(RlctlTrainerInit(rank=1), client=None, source=source())
    trainer.send_weights()
    assert taken == list(house.model.tensors())
    trainer.shutdown()


@pytest.mark.parametrize("staged", [False, True])
def test_names_that_do_not_match_are_refused_and_named(house: House, staged: bool) -> None:
    trainer = house.trainer("rlctl-gloo", staged=staged)
    house.model.become(3)
    trainer.send_weights()
    before = decoded(house.llm.collective_rpc("rlctl_digests")[0])
    house.model.become(4)
    house.model.leave_out = {"model.norm.weight"}
    house.model.add = {"model.layers.9.bias": torch.ones(1)}
    try:
        with pytest.raises(
            RlctlError, match=r"unknown 1, untouched 1 \(model.layers.9.bias, model.norm.weight\)"
        ) as info:
            trainer.send_weights()
    finally:
        house.model.leave_out, house.model.add = set(), {}
    assert ("have their old weights" if staged else "must not generate") in str(info.value)
    if staged:
        assert decoded(house.llm.collective_rpc("rlctl_digests")[0]) == before
        house.model.become(3)
        house.assert_serves_the_model()
    house.model.become(5)
    trainer.send_weights()
    house.assert_serves_the_model()
    trainer.shutdown()
