"""Tiny random models of every architecture, saved by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.shapes import tensor_shapes

BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen2_moe": {
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 16,
        "mlp_only_layers": [0],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}

# Beyond those that must work; each has a status of its own in docs/convert-keys.md.
_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "in_channels": 3,
}
_TEXT = {name: value for name, value in BASE.items() if not name.endswith("token_id")}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen2_5_vl": {
        "text_config": _TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": _TOWER,
        "tie_word_embeddings": True,
    },
    "qwen3_vl": {
        "text_config": _TEXT | {"head_dim": 16},
        "vision_config": _TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
}


def save(model_type: str, folder: Path, *, seed: int = 0, shard: str = "20KB", **changes: Any) -> torch.nn.Module:
    """Save a random float32 model in shards and return it, in evaluation mode; norms and biases are random too."""
    values = MORE[model_type] if model_type.endswith("_vl") else BASE | (MODELS | MORE)[model_type]
    config = AutoConfig.for_model(model_type, **(values | changes))
    torch.manual_seed(seed)
    model = _class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)  # apart enough that a block in the wrong place changes the logits
    model.save_pretrained(folder, max_shard_size=shard)
    return model.eval()


def _class(config: Any) -> Any:
    return AutoModelForImageTextToText if config.model_type.endswith("_vl") else AutoModelForCausalLM


@torch.no_grad()
def logits(model: torch.nn.Module, *, length: int = 9) -> torch.Tensor:
    """Return the logits (2, length, vocabulary) of fixed tokens."""
    tokens = torch.arange(2 * length).reshape(2, length) * 7 % 97
    return model(tokens).logits


def load(folder: Path) -> torch.nn.Module:
    """Load a folder with transformers; every name must be one it expects, and none may be missing."""
    model, info = _class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def add_prediction_layer(folder: Path) -> dict[str, torch.Tensor]:
    """Give a saved DeepSeek-V3 the multi-token-prediction layer that published files hold; return all its tensors."""
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("model*"):
        if file.suffix == ".safetensors":
            weights |= load_file(file)
        file.unlink()
    spec = ModelSpec.from_folder(folder)
    for name, shape in tensor_shapes(spec, mtp=True).items():
        weights.setdefault(name, torch.randn(shape))
    at = f"model.layers.{spec.layers}."
    weights[f"{at}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{at}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights
