"""Published configurations of well-known models, so that they can be sized and planned for without a download."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

from rlctl.errors import UsageError
from rlctl.keys.model_spec import ModelSpec
from rlctl.registry import suggest


def _config(model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int,
            **rest: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        **rest,
    }


# What a hub name has behind that of its architecture.
_TRAINED_ON = re.compile(r"-(instruct|base|chat|hf|it)(-.*)?$")

_DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

# The values of each model's config.json on its hub page that shapes follow from.
_PRESETS = MappingProxyType({
    "qwen3-0.6b": _config("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-1.7b": _config("qwen3", 2048, 28, 16, 8, 6144, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-4b": _config("qwen3", 2560, 36, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _config("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-14b": _config("qwen3", 5120, 40, 40, 8, 17408, 151936, head_dim=128),
    "qwen3-32b": _config("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "qwen3-235b-a22b": _config(
        "qwen3_moe", 4096, 94, 64, 4, 12288, 151936, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "qwen2.5-0.5b": _config("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": _config("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "qwen2-1.5b": _config("qwen2", 1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True),
    "llama-3.1-8b": _config("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-3.1-70b": _config("llama", 8192, 80, 64, 8, 28672, 128256),
    "llama-3.1-405b": _config("llama", 16384, 126, 128, 8, 53248, 128256),
    "deepseek-v3": _config(
        "deepseek_v3", 7168, 61, 128, 128, 18432, 129280, **_DEEPSEEK,
        n_routed_experts=256, first_k_dense_replace=3, num_nextn_predict_layers=1,
    ),
    "kimi-k2": _config(
        "kimi_k2", 7168, 61, 64, 64, 18432, 163840, **_DEEPSEEK,
        n_routed_experts=384, first_k_dense_replace=1, num_nextn_predict_layers=0,
    ),
})  # fmt: skip


def preset_names() -> list[str]:
    """Return the names of every preset."""
    return list(_PRESETS)


def preset_of_hub_name(name: str) -> str | None:
    """Return the preset of a hub name such as ``Qwen/Qwen2.5-7B-Instruct``; None when there is none of that size."""
    short = _TRAINED_ON.sub("", name.rpartition("/")[2].lower())
    return short if short in _PRESETS else None


def preset_config(name: str) -> dict[str, Any]:
    """Return a copy of a preset's configuration, with the keys of a config.json. Raises UsageError for a typo."""
    found = _PRESETS.get(name.lower())
    if found is None:
        near = suggest(name, _PRESETS)
        hint = f"did you mean {near!r}? " if near else ""
        raise UsageError(f"unknown model preset {name!r}", fix=f"{hint}known: {', '.join(_PRESETS)}")
    return dict(found)


def preset(name: str) -> ModelSpec:
    """Return the ModelSpec of a preset (``qwen3-8b``, ``kimi-k2``, ...)."""
    return ModelSpec.from_config(preset_config(name), where=f"preset {name}")
