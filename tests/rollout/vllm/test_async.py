"""An AsyncLLM, its engine in a process of its own, takes weights while it serves."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.process import run_token
from rlctl.rollout.vllm.handles import AsyncLLMHandle
from rlctl.rollout.vllm.replica import VllmReplica
from rlctl.sync.engine import EngineOptions
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.member import described
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.report import SyncError
from rlctl.sync.states import Ending
from rlctl.sync.worker_process import WorkerProcesses
from tests.rollout.vllm.tiny_engines import PROMPT, TinyModel, engine_arguments, spoken, vllm_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class House:
    """A trainer here, a worker, and an engine behind it."""

    def __init__(self, folder: Path) -> None:
        self.model = TinyModel()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model.model.save_pretrained(folder)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = self.run(self.start(folder)).result(200)
        self.replica = VllmReplica(AsyncLLMHandle(self.engine, self.loop), "one")
        options = EngineOptions(bucket_size=64 << 10, timeout=60.0, token=run_token())
        self.host = SourceHost(self.model)
        self.host.open("ipc", "trainer", 0, 1, asdict(options))
        self.workers = WorkerProcesses("ipc", options)
        self.workers.join("one", self.replica.loaders)
        self.workers.open(60)
        self.requests = 0

    async def start(self, folder: Path) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(**engine_arguments(folder, weight_transfer_config={"backend": "rlctl-ipc"}))
        )

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def ask(self, tokens: int, prompt: list[int] = PROMPT) -> Future[Any]:
        """Return the future output of a request."""
        self.requests += 1
        return self.run(self._ask(f"r{self.requests}", tokens, prompt))

    async def _ask(self, name: str, tokens: int, prompt: list[int]) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, logprobs=0, temperature=0, detokenize=False)
        last = None
        async for output in self.engine.generate({"prompt_token_ids": prompt}, params, request_id=name):
            last = output
        return last

    def manager(self, **policy: Any) -> SyncManager:
        trainers = LocalMembers([LocalMember("trainer 0", self.host)])
        policy = {"timeout": 60.0, **policy}
        return SyncManager(trainers, self.workers, [self.replica], engine="ipc", policy=SyncPolicy(**policy))

    def become(self, version: int) -> int:
        self.model.become(version)
        return version

    def assert_serves_the_model(self, *, cached: int = 0) -> None:
        for hit in (cached, 128):
            output = self.ask(8).result(60)
            assert output.num_cached_tokens == hit
            tokens, logprobs = spoken(output)
            torch.testing.assert_close(logprobs, self.model.logprobs(PROMPT, tokens), atol=1e-5, rtol=0)
        assert self.replica.digests() == [{n: described(n, t) for n, t in self.model.tensors().items()}]

    def close(self) -> None:
        self.workers.close()
        self.host.close()
        self.engine.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)


class Client:
    """vLLM's VLLMWeightSyncClient, of the engine's event loop."""

    def __init__(self, house: House) -> None:
        self.engine, self.run = house.engine, house.run

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self.run(self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info))).result(60)

    def start_weight_update(self) -> None:
        self.run(self.engine.start_weight_update()).result(60)

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.run(self.engine.update_weights(WeightTransferUpdateRequest(update_info))).result(60)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.run(self.engine.finish_weight_update(weight_version)).result(60)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("vllm")
    with vllm_environment(folder / "path"):
        house = House(folder / "model")
        yield house
        house.close()


@pytest.mark.parametrize("commit", ["inplace", "staged"])
@pytest.mark.parametrize("how", ["abort", "keep", "wait"])
def test_a_request_lives_through_a_sync(house: House, how: str, commit: str) -> None:
    manager = house.manager(interruption=how, commit=commit)
    manager.sync(house.become(1))
    request = house.ask(300)
    time.sleep(0.1)
    assert manager.sync(house.become(2)).ending is Ending.COMMITTED
    assert house.replica.serving == 2
    tokens, logprobs = spoken(request.result(60))
    finished = request.result().outputs[0].finish_reason
    assert (finished, len(tokens) < 300) == (("abort", True) if how == "abort" else ("length", False))
    # The last token is of the new weights, if the request went on: computed anew from its first token on.
    ending = house.model.logprobs(PROMPT, tokens)[-1:]
    if how == "keep":
        torch.testing.assert_close(logprobs[-1:], ending, atol=1e-5, rtol=0)
    else:
        assert (logprobs[-1:] - ending).abs() > 1e-4
    assert house.run(house.engine.get_weight_version()).result(20) == "2"
    # A request that was kept has put its prompt, as the new weights see it, into the cache.
    house.assert_serves_the_model(cached=128 if how == "keep" else 0)


def test_damage_keeps_requests_waiting_until_it_is_healed(house: House) -> None:
    manager = house.manager(attempts=1, interruption="keep")
    manager.sync(house.become(3))
    house.host.inject({"kind": "flip", "at": 1})
    with pytest.raises(SyncError, match="did not arrive as it was sent"):
        manager.sync(house.become(4))
    assert house.replica.serving is None
    request = house.ask(4)
    time.sleep(0.5)
    assert not request.done()
    manager.sync(house.become(5))
    tokens, logprobs = spoken(request.result(60))
    torch.testing.assert_close(logprobs, house.model.logprobs(PROMPT, tokens), atol=1e-5, rtol=0)
    manager.sync(house.become(6))
    house.assert_serves_the_model()


def test_vllms_own_calls_and_an_update_that_fails_half_way(house: House) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from rlctl.rollout.vllm.trainer_engine import RlctlTrainerInit

    class Source:
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return house.model.per_tensor_params()

    info = RlctlTrainerInit(rank=0, backend="rlctl-ipc", options=EngineOptions(bucket_size=64 << 10, timeout=30.0))
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=Client(house), source=Source())
    trainer.send_weights(house.become(11))
    assert house.run(house.engine.get_weight_version()).result(20) == "11"
    house.assert_serves_the_model()
    house.become(12)
    house.model.leave_out = {"model.norm.weight"}
    try:
        with pytest.raises(RlctlError, match=r"untouched 1 \(model.norm.weight\)"):
            trainer.send_weights()
    finally:
        house.model.leave_out = set()
    request = house.ask(4)
    with pytest.raises(Exception, match="failed half way"):
        house.run(house.engine.resume_generation()).result(20)
    time.sleep(0.5)
    assert not request.done()
    trainer.send_weights(house.become(13))
    tokens, logprobs = spoken(request.result(60))
    torch.testing.assert_close(logprobs, house.model.logprobs(PROMPT, tokens), atol=1e-5, rtol=0)
    trainer.shutdown()
