"""What sets one model architecture's weights apart from another's, as a table.

A row says which tensors exist and which configuration keys give their sizes; nothing is ever guessed from a shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from rlctl.keys.vision import VisionKind

BiasRule = bool | tuple[str, bool]  # always / never, or (configuration key, its default)


@dataclass(frozen=True)
class Experts:
    """How a family's mixture-of-experts layers are sized and named on disk.

    Attributes:
        count: configuration keys that may hold the number of routed experts, in order of preference.
        width: configuration key of one expert's feed-forward width.
        placement: which layers are sparse: every one, by ``decoder_sparse_step`` and ``mlp_only_layers``, or all after
            ``first_k_dense_replace``.
        block: the MoE module in per-expert (v4, on-disk) names.
        parts: names of gate, up and down inside one expert on disk; empty when the disk form is the fused one.
        router: name of the router module (both forms).
        shared: name of the always-active expert, or None.
        shared_gate: the shared expert has a gate of its own.
        router_correction: the router holds a score-correction vector (a float32 buffer).
        stored: "out_in" where fused tensors are (E, out, in), "in_out" for gpt-oss, which keeps (E, in, out) and mixes
            gate and up on the last dimension (even: gate, odd: up).
        bias: router and experts have biases.
    """

    count: tuple[str, ...]
    width: str
    placement: Literal["all", "sparse_step", "first_k_dense"]
    block: str = "mlp"
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    shared: str | None = None
    shared_gate: bool = False
    router_correction: bool = False
    stored: Literal["out_in", "in_out"] = "out_in"
    bias: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture family; see the table below."""

    architecture: str
    qkv_bias: BiasRule = False
    o_bias: BiasRule = False
    mlp_bias: BiasRule = False
    qk_norm: bool = False
    default_head_dim: int | None = None  # None: hidden size / heads
    experts: Experts | None = None
    latent_attention: bool = False
    sinks: bool = False
    vision: VisionKind | None = None


_ATTENTION_BIAS: BiasRule = ("attention_bias", False)
_QWEN_EXPERTS = Experts(("num_experts", "num_local_experts"), "moe_intermediate_size", "sparse_step")

FAMILIES = MappingProxyType({
    "llama": Family(
        "LlamaForCausalLM", qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, mlp_bias=("mlp_bias", False)
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM", qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm=True, default_head_dim=128
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        qkv_bias=("qkv_bias", True),
        experts=Experts(
            ("num_experts", "num_local_experts"),
            "moe_intermediate_size",
            "sparse_step",
            shared="shared_expert",
            shared_gate=True,
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm=True, experts=_QWEN_EXPERTS
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        experts=Experts(
            ("num_local_experts", "num_experts"),
            "intermediate_size",
            "all",
            block="block_sparse_moe",
            parts=("w1", "w3", "w2"),
        ),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        latent_attention=True,
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        experts=Experts(
            ("n_routed_experts", "num_local_experts"),
            "moe_intermediate_size",
            "first_k_dense",
            shared="shared_experts",
            router_correction=True,
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        qkv_bias=("attention_bias", True),
        o_bias=("attention_bias", True),
        default_head_dim=64,
        sinks=True,
        experts=Experts(
            ("num_local_experts", "num_experts"),
            "intermediate_size",
            "all",
            parts=(),
            router="router",
            stored="in_out",
            bias=True,
        ),
    ),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", qkv_bias=True, vision="qwen2_5_vl"),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm=True,
        default_head_dim=128,
        vision="qwen3_vl",
    ),
})  # fmt: skip

# Other model_type values whose weights follow a family exactly.
ALIASES = MappingProxyType({"kimi_k2": "deepseek_v3"})


def known_model_types() -> list[str]:
    """Return every model_type that rlctl can lay out."""
    return sorted([*FAMILIES, *ALIASES])
