"""Random small configurations of every architecture that must work, for the tests of this folder."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

from rlctl.keys.model_spec import ModelSpec

REQUIRED = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral")
MOE = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3")


@st.composite
def configs(draw: st.DrawFn, types: tuple[str, ...] = REQUIRED) -> dict[str, Any]:
    """Draw a config.json: heads, groups, head_dim, experts, tied or not, biases, odd vocabulary."""
    model_type = draw(st.sampled_from(types))
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = groups * draw(st.sampled_from([1, 2, 3]))
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": heads * 2,
        "num_hidden_layers": draw(st.sampled_from([1, 2, 4])),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": draw(st.sampled_from([2, 6])),
        "intermediate_size": draw(st.sampled_from([4, 12])),
        "vocab_size": draw(st.integers(3, 40)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if model_type in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = draw(st.booleans())
    if model_type == "llama":
        config["mlp_bias"] = draw(st.booleans())
    if model_type in ("qwen2_moe", "qwen3_moe"):
        config |= {
            "num_experts": draw(st.sampled_from([2, 4, 12])),
            "moe_intermediate_size": 4,
            "decoder_sparse_step": draw(st.sampled_from([1, 2])),
            "mlp_only_layers": draw(st.sampled_from([[], [0]])),
        }
    if model_type == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": 8, "qkv_bias": draw(st.booleans())}
    if model_type == "mixtral":
        config["num_local_experts"] = draw(st.sampled_from([2, 4, 12]))
    if model_type == "deepseek_v3":
        config |= {
            "num_key_value_heads": heads,
            "n_routed_experts": draw(st.sampled_from([2, 4, 12])),
            "moe_intermediate_size": 4,
            "n_shared_experts": draw(st.sampled_from([1, 2])),
            "first_k_dense_replace": draw(st.sampled_from([0, 1])),
            "q_lora_rank": draw(st.sampled_from([None, 8])),
            "kv_lora_rank": draw(st.sampled_from([6, 10])),
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 6,
            "tie_word_embeddings": False,
        }
    return config


def divisors(count: int, limit: int = 4) -> list[int]:
    """Return the sizes up to ``limit`` that ``count`` can be cut into."""
    return [n for n in range(1, limit + 1) if count % n == 0]


def grids(spec: ModelSpec) -> st.SearchStrategy[dict[str, int]]:
    """Draw tensor-, pipeline- and expert-parallel sizes that divide the model."""
    ranks = (spec.mla.q_rank or spec.ffn, spec.mla.kv_rank + spec.mla.rope_dim) if spec.mla else ()
    heads = spec.heads if spec.mla else spec.kv_heads
    whole = math.gcd(heads, spec.ffn, spec.moe_ffn or spec.ffn, spec.shared_ffn or spec.ffn, *ranks)
    return st.fixed_dictionaries(
        {
            "tp": st.sampled_from(divisors(whole)),
            "pp": st.sampled_from(divisors(spec.layers)),
            "ep": st.sampled_from(divisors(spec.experts) if spec.experts else [1]),
        }
    )


def random_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Return bfloat16 tensors of random bits, NaN patterns included, under the names of ``shapes``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in shapes.items()
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors agree in shape, dtype and every bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)) if one.numel() else True
    )
