"""Qwen2-MoE, Qwen3-MoE and Mixtral: routed experts, with or without an expert that always runs."""

from __future__ import annotations

from rlctl.keys.architectures.dense import ATTENTION, FEED_FORWARD
from rlctl.keys.architectures.rows import Architecture, Row, linear, whole

HELD = {
    "hf": "verified",
    "hf-fused": "verified",
    "megatron": "verified",
    "vllm": "verified",
    "vllm-runtime": "verified",
}


def block(name: str) -> tuple[Row, ...]:
    """Return the rows of a block ``name`` outside its routed experts, without a shared one."""
    return (
        whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        whole("mlp.router.weight", f"{name}.gate.weight"),
    )


def expert(name: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Return the rows of one routed expert of the block ``name``."""
    local = "mlp.experts.local_experts.{e}.linear_fc"
    parts = f"{name}.experts.{{e}}."
    return (
        Row("gate_up", "mlp.experts.linear_fc1.weight{e}", (parts + gate, parts + up), f"{local}1.weight"),
        Row("columns", "mlp.experts.linear_fc2.weight{e}", (parts + down,), f"{local}2.weight"),
    )


PROJECTIONS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")

QWEN2_MOE = Architecture(
    "qwen2_moe",
    ATTENTION,
    FEED_FORWARD,
    sparse=(
        *block("mlp"),
        *linear("gate_up", "mlp.shared_experts.linear_fc1", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        *linear("columns", "mlp.shared_experts.linear_fc2", "mlp.shared_expert.down_proj"),
        whole("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    ),
    expert=expert("mlp", *PROJECTIONS),
    status=HELD,
)
QWEN3_MOE = Architecture(
    "qwen3_moe", ATTENTION, FEED_FORWARD, sparse=block("mlp"), expert=expert("mlp", *PROJECTIONS), status=HELD
)
MIXTRAL = Architecture(
    "mixtral",
    ATTENTION,
    sparse=block("block_sparse_moe"),
    expert=expert("block_sparse_moe", "w1.weight", "w3.weight", "w2.weight"),
    status=HELD,
)
