"""An AsyncLLM, its engine in a process of its own, takes adapters while it serves."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.model.lora import LoraEngine
from rlctl.rollout.vllm.adapters import VllmAdapters
from rlctl.rollout.vllm.handles import AsyncLLMHandle
from tests.rollout.vllm.test_lora import CONFIG, move, trainer
from tests.rollout.vllm.tiny_engines import PROMPT, engine_arguments, spoken, vllm_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class House:
    """An engine behind its handle."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = self.run(self.start(folder)).result(200)
        self.handle = AsyncLLMHandle(self.engine, self.loop)
        self.requests = 0

    async def start(self, folder: Path) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        more = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(folder, **more)))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def ask(self, request: Any, tokens: int, begun: threading.Event | None = None) -> Future[Any]:
        """Return the future output of a request; ``begun`` is set when its first token is there."""
        self.requests += 1
        return self.run(self._ask(f"r{self.requests}", request, tokens, begun or threading.Event()))

    async def _ask(self, name: str, request: Any, tokens: int, begun: threading.Event) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, logprobs=0, temperature=0, detokenize=False)
        last = None
        prompt = {"prompt_token_ids": PROMPT}
        async for output in self.engine.generate(prompt, params, request_id=name, lora_request=request):
            last = output
            begun.set()
        return last


def gaps(one: LoraEngine, output: Any) -> np.ndarray:
    """Return how far each token's log-prob is from the trainer's."""
    tokens, logprobs = spoken(output)
    size = len(tokens)
    row = Row(RequestKey(0, 0), 0, PROMPT, tokens, 0.0, np.zeros(size, np.float32), np.zeros(size, np.int64))
    return np.abs(one.log_probs([row], temperature=1.0)[0] - logprobs.numpy())


def test_requests_go_on_under_the_adapter_that_comes_meanwhile(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path / "base")
    one, before = (trainer(tmp_path / "base") for _ in range(2))
    with vllm_environment(tmp_path / "path"):
        house = House(tmp_path / "base")
        try:
            adapters = VllmAdapters(house.handle, "one", one.adapter_config)
            for version in (1, 2):
                move(one)
                adapters.load_adapter(one.adapter_params(), version)
                output = house.ask(adapters.request, 8).result(60)
                assert output.num_cached_tokens == 0 and gaps(one, output).max() < 1e-5
            for version in range(3, 8):
                before.load(one.state())
                begun = threading.Event()
                running = house.ask(adapters.request, 340, begun)
                assert begun.wait(60)
                move(one)
                adapters.load_adapter(one.adapter_params(), version)
                output = running.result(100)
                old, new = gaps(before, output), gaps(one, output)
                if old.max() > 1e-5:  # else it had ended before the update came
                    break
            # Its first tokens are the old adapter's. What came after the update is the new one's: no old key is left.
            assert len(new) == 340 and old[0] < 1e-5 and new[-20:].max() < 1e-5 < new[0]
        finally:
            house.engine.shutdown()
