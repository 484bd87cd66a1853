"""vLLM serves the adapter that training leaves in final/: its log-probs are the trainer's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.model.lora import LoraEngine
from rlctl.schema.training import OptimizerConfig
from rlctl.schema.work import LoraConfig
from tests.rollout.vllm.tiny_engines import PROMPT, end_engine, engine_arguments, spoken, vllm_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=128, num_hidden_layers=2, intermediate_size=192, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512,
)  # fmt: skip


def trainer(folder: Path) -> LoraEngine:
    """Return an engine on the model in ``folder``, its adapter moved away from zero."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    one = LoraEngine(model, OptimizerConfig(), lora=LoraConfig(rank=8), seed=0, base=str(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return one


def test_log_probs_of_a_served_adapter_are_the_trainers(tmp_path: Path) -> None:
    one = trainer(tmp_path / "base")
    one.save_pretrained(tmp_path / "final")
    with vllm_environment(tmp_path / "path"):
        import vllm
        from vllm.lora.request import LoRARequest

        more = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
        llm = vllm.LLM(**engine_arguments(tmp_path / "base", **more))
        params = vllm.SamplingParams(max_tokens=8, logprobs=0, temperature=0, detokenize=False)
        request = LoRARequest("final", 1, str(tmp_path / "final"))
        for adapter in (None, request):
            output = llm.generate([{"prompt_token_ids": PROMPT}], params, lora_request=adapter, use_tqdm=False)[0]
            tokens, logprobs = spoken(output)
            size = len(tokens)
            row = Row(RequestKey(0, 0), 0, PROMPT, tokens, 0.0, np.zeros(size, np.float32), np.zeros(size, np.int64))
            gap = np.abs(one.log_probs([row], temperature=1.0)[0] - logprobs.numpy()).max()
            assert gap < 1e-5 if adapter else gap > 1e-2
        end_engine(llm)
