"""Llama, Qwen2 (and 2.5) and Qwen3: one attention block and one gated feed-forward block a layer."""

from __future__ import annotations

from rlctl.keys.architectures.rows import Architecture, linear, whole

ATTENTION = (
    whole("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", local="input_layernorm.weight"),
    *linear("qkv", "self_attention.linear_qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    *linear("columns", "self_attention.linear_proj", "self_attn.o_proj"),
    whole("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    whole("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
FEED_FORWARD = (
    whole("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", local="pre_mlp_layernorm.weight"),
    *linear("gate_up", "mlp.linear_fc1", "mlp.gate_proj", "mlp.up_proj"),
    *linear("columns", "mlp.linear_fc2", "mlp.down_proj"),
)
HELD = {
    "hf": "verified",
    "hf-fused": "same as hf",
    "megatron": "verified",
    "vllm": "verified",
    "vllm-runtime": "verified",
}

LLAMA = Architecture("llama", ATTENTION, FEED_FORWARD, status=HELD)
QWEN2 = Architecture("qwen2", ATTENTION, FEED_FORWARD, status=HELD)
QWEN3 = Architecture("qwen3", ATTENTION, FEED_FORWARD, status=HELD)
