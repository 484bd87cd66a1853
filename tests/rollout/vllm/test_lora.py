"""vLLM serves adapters, of final/ and of updates in memory: its log-probs are the trainer's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.model.lora import LoraEngine
from rlctl.rollout.vllm.adapters import VllmAdapters
from rlctl.rollout.vllm.handles import LLMHandle
from rlctl.schema.training import OptimizerConfig
from rlctl.schema.work import LoraConfig
from tests.rollout.vllm.tiny_engines import PROMPT, end_engine, engine_arguments, spoken, vllm_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=128, num_hidden_layers=2, intermediate_size=192, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with vllm_environment(tmp_path_factory.mktemp("path")):
        import vllm

        llm = vllm.LLM(**engine_arguments(folder, enable_lora=True, max_lora_rank=8, max_loras=1))
        yield llm
        end_engine(llm)


def trainer(folder: Path, **settings: Any) -> LoraEngine:
    """Return an engine on the model in ``folder``, its adapter moved away from zero."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    one = LoraEngine(model, OptimizerConfig(), lora=LoraConfig(**{"rank": 8, **settings}), seed=0, base=str(folder))
    move(one)
    return one


def move(one: LoraEngine) -> None:
    with torch.no_grad():
        for name, parameter in one.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.07)


def gap(llm: Any, one: LoraEngine, request: Any, *, cached: int) -> float:
    """Return how far log-probs of a greedy response are from the trainer's; ``cached`` tokens come from the cache."""
    import vllm

    params = vllm.SamplingParams(max_tokens=8, logprobs=0, temperature=0, detokenize=False)
    output = llm.generate([{"prompt_token_ids": PROMPT}], params, lora_request=request, use_tqdm=False)[0]
    assert output.num_cached_tokens == cached
    tokens, logprobs = spoken(output)
    size = len(tokens)
    row = Row(RequestKey(0, 0), 0, PROMPT, tokens, 0.0, np.zeros(size, np.float32), np.zeros(size, np.int64))
    return float(np.abs(one.log_probs([row], temperature=1.0)[0] - logprobs.numpy()).max())


def test_log_probs_of_a_served_adapter_are_the_trainers(llm: Any, folder: Path, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    torch.manual_seed(1)
    one = trainer(folder)
    one.save_pretrained(tmp_path / "final")
    assert gap(llm, one, None, cached=0) > 1e-2
    found = gap(llm, one, LoRARequest("final", 9, str(tmp_path / "final")), cached=0)
    print("gap", found)
    assert found < 1e-5


def test_updates_in_memory_are_served_each_with_the_trainers_log_probs(llm: Any, folder: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    torch.manual_seed(seed)
    one = trainer(folder)
    handle = LLMHandle(llm)
    adapters = VllmAdapters(handle, "one", one.adapter_config)
    with pytest.raises(RlctlError, match="has no adapter"):
        _ = adapters.request
    for version in (1, 2, 3):
        if version < 3:  # the third is the second again: a scale must not count twice
            move(one)
        before = one.params_digest()
        report = adapters.load_adapter(one.adapter_params(), version)
        assert report.complete and len(report.loaded) == 28
        assert one.params_digest() == before and adapters.version == version
        with handle.batch(timeout=10):
            assert gap(llm, one, adapters.request, cached=0) < 1e-5
            assert gap(llm, one, adapters.request, cached=128) < 1e-5  # to be stale after the next update
            # The base is served as ever to who names no adapter; the cache keeps the two apart.
            assert gap(llm, one, None, cached=0) > 1e-2
    # What does not fit is refused, and the adapter of before serves on.
    high = trainer(folder, rank=16)
    with pytest.raises(UsageError, match="rank 16"):
        VllmAdapters(handle, "one", high.adapter_config).load_adapter(high.adapter_params(), 4)
    odd = ((name.replace("q_proj", "q_prj"), tensor) for name, tensor in one.adapter_params())
    with pytest.raises(UsageError, match="no such module"):
        adapters.load_adapter(odd, 4)
    assert adapters.version == 3
    with handle.batch(timeout=10):
        assert gap(llm, one, adapters.request, cached=128) < 1e-5
