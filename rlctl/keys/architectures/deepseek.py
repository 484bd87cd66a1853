"""DeepSeek-V3 (and Kimi-K2): multi-head latent attention, grouped routing, an expert that always runs."""

from __future__ import annotations

from rlctl.keys.architectures.dense import FEED_FORWARD
from rlctl.keys.architectures.moe import PROJECTIONS, block, expert
from rlctl.keys.architectures.rows import Architecture, linear, whole

LATENT_ATTENTION = (
    whole("input_layernorm.weight", "input_layernorm.weight"),
    *linear("rows", "self_attention.linear_q_proj", "self_attn.q_proj"),
    *linear("whole", "self_attention.linear_q_down_proj", "self_attn.q_a_proj", local_kind="rows"),
    whole(
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attn.q_a_layernorm.weight",
        local="self_attention.q_layernorm.weight",
    ),
    *linear("rows", "self_attention.linear_q_up_proj", "self_attn.q_b_proj"),
    *linear("whole", "self_attention.linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa", local_kind="rows"),
    whole(
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attn.kv_a_layernorm.weight",
        local="self_attention.kv_layernorm.weight",
    ),
    *linear("rows", "self_attention.linear_kv_up_proj", "self_attn.kv_b_proj"),
    *linear("columns", "self_attention.linear_proj", "self_attn.o_proj"),
)

DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    LATENT_ATTENTION,
    FEED_FORWARD,
    sparse=(
        *block("mlp"),
        whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
        *linear(
            "gate_up", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"
        ),
        *linear("columns", "mlp.shared_experts.linear_fc2", "mlp.shared_experts.down_proj"),
    ),
    expert=expert("mlp", *PROJECTIONS),
    prediction=(
        whole("enorm.weight", "enorm.weight"),
        whole("hnorm.weight", "hnorm.weight"),
        linear("rows", "eh_proj", "eh_proj")[0],
        whole("final_layernorm.weight", "shared_head.norm.weight"),
    ),
    status={
        "hf": "verified",
        "hf-fused": "verified",
        "megatron": "verified",
        "vllm": "names only",
        "vllm-runtime": "round trip only",
    },
)
