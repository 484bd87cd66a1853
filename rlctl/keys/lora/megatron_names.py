"""Names of Megatron-Bridge's LoRA tensors against those of the adapted Hugging Face modules.

Fused LoRA has one pair for a fused linear layer (``<linear>.adapter.linear_in|linear_out.weight``), canonical LoRA one
for each projection (``<linear>.adapter.adapter_q.linear_in.weight``). The base weight of a wrapped layer is
``<linear>.to_wrap.weight``. Layer numbers are those of the whole model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlctl.keys.model_spec import ModelSpec

Parallel = Literal["column", "row", "none"]
Side = Literal["in", "out", "magnitude"]

_ADAPTER = re.compile(
    r"(?P<linear>.+)\.adapter(?:\.adapter_(?P<key>q|k|v|gate|up))?"
    r"\.(?:linear_(?P<side>in|out)\.weight|weight_magnitude)"
)


@dataclass(frozen=True)
class Linear:
    """One linear layer of Megatron's.

    Args:
        name: its path.
        modules: the Hugging Face modules (or stacked parameter) that it holds, in order.
        keys: what canonical LoRA calls each; empty strings where it is one module.
        parallel: how tensor parallelism cuts it.
        stacked: it holds all experts (grouped GEMM).
    """

    name: str
    modules: tuple[str, ...]
    keys: tuple[str, ...]
    parallel: Parallel
    stacked: bool = False

    @property
    def gated(self) -> bool:
        """Whether its outputs are gate and up, which tensor parallelism cuts one by one."""
        return self.name.endswith("linear_fc1")


@dataclass(frozen=True)
class MegatronKey:
    """One adapter tensor: its linear layer, the key of canonical LoRA or an empty string, and which tensor it is."""

    linear: str
    key: str
    side: Side


def strip_to_wrap(name: str) -> str:
    """Return the name that a base tensor has in a model without adapters."""
    return name.replace(".to_wrap.", ".")


def parse_megatron_key(name: str) -> MegatronKey | None:
    """Take an adapter tensor's name apart; None for any other tensor."""
    found = _ADAPTER.fullmatch(name)
    if found is None:
        return None
    side: Side = "magnitude" if found["side"] is None else "in" if found["side"] == "in" else "out"
    return MegatronKey(found["linear"], found["key"] or "", side)


def format_megatron_key(key: MegatronKey) -> str:
    """Write an adapter tensor's name."""
    at = f"{key.linear}.adapter" + (f".adapter_{key.key}" if key.key else "")
    return f"{at}.weight_magnitude" if key.side == "magnitude" else f"{at}.linear_{key.side}.weight"


def linears(spec: ModelSpec) -> list[Linear]:
    """Return every linear layer of the model that an adapter can be on, the routed experts as stacks."""
    found = []
    for layer in range(spec.layers):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        found += _attention(spec, f"{here}.self_attention", f"{there}.self_attn")
        moe = spec.moe if spec.is_moe_layer(layer) else None
        if moe is None:
            found += _feed_forward(f"{here}.mlp", f"{there}.mlp")
            continue
        experts = f"{there}.mlp.experts"
        found += [
            Linear(f"{here}.mlp.experts.linear_fc1", (f"{experts}.gate_up_proj",), ("",), "column", stacked=True),
            Linear(f"{here}.mlp.experts.linear_fc2", (f"{experts}.down_proj",), ("",), "row", stacked=True),
            Linear(f"{here}.mlp.router", (f"{there}.mlp.{moe.router}",), ("",), "none"),
        ]
        if moe.shared:
            found += _feed_forward(f"{here}.mlp.shared_experts", f"{there}.mlp.{moe.shared}")
    found.append(Linear("output_layer", ("lm_head",), ("",), "column"))
    return found


def _attention(spec: ModelSpec, here: str, there: str) -> list[Linear]:
    out = Linear(f"{here}.linear_proj", (f"{there}.o_proj",), ("",), "row")
    if spec.mla is None:
        parts = (f"{there}.q_proj", f"{there}.k_proj", f"{there}.v_proj")
        return [Linear(f"{here}.linear_qkv", parts, ("q", "k", "v"), "column"), out]
    names = {"linear_kv_down_proj": "kv_a_proj_with_mqa", "linear_kv_up_proj": "kv_b_proj"}
    if spec.mla.q_rank is None:
        names["linear_q_proj"] = "q_proj"
    else:
        names |= {"linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj"}
    found = [
        Linear(f"{here}.{mine}", (f"{there}.{theirs}",), ("",), "none" if "down" in mine else "column")
        for mine, theirs in names.items()
    ]
    return [*found, out]


def _feed_forward(here: str, there: str) -> list[Linear]:
    return [
        Linear(f"{here}.linear_fc1", (f"{there}.gate_proj", f"{there}.up_proj"), ("gate", "up"), "column"),
        Linear(f"{here}.linear_fc2", (f"{there}.down_proj",), ("",), "row"),
    ]
