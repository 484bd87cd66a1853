"""Small models of every family, and what vLLM's ranks hold of them, written down apart from the code under test."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rlctl.keys.model_spec import ModelSpec
from rlctl.sync.boxes import slices
from rlctl.sync.layout import Layout
from rlctl.sync.weights import Weight

Array = npt.NDArray[np.int64]


def small_spec(family: str, rng: random.Random) -> ModelSpec:
    """A model whose heads and widths divide by 4, so that tp may be 1, 2 or 4."""
    kv = rng.choice([1, 2, 4])
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": 8,
        "num_hidden_layers": rng.choice([2, 3, 5]),
        "num_attention_heads": rng.choice([4, 8]),
        "num_key_value_heads": kv,
        "head_dim": 2,
        "intermediate_size": rng.choice([4, 12]),
        "vocab_size": rng.choice([10, 64, 130]),
        "tie_word_embeddings": rng.random() < 0.5,
        "torch_dtype": "bfloat16",
    }
    if family == "qwen3_moe":
        config |= {"num_experts": rng.choice([4, 6, 8]), "moe_intermediate_size": 8, "mlp_only_layers": [0]}
    if family in ("mixtral", "gpt_oss"):
        config["num_local_experts"] = 4
    if family == "deepseek_v3":
        config |= {
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "q_lora_rank": rng.choice([None, 6]), "kv_lora_rank": 4,
            "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2,
            "num_key_value_heads": config["num_attention_heads"],
        }  # fmt: skip
    return ModelSpec.from_config(config)


FAMILIES = ["qwen2", "qwen3", "llama", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]


def numbered(weights: list[Weight]) -> dict[str, Array]:
    """Tensors in which every element of the model has a number of its own."""
    found, start = {}, 0
    for weight in weights:
        found[weight.name] = np.arange(start, start + weight.elements).reshape(weight.shape)
        start += prod(weight.shape)
    return found


def held_tensors(weights: list[Weight], layout: Layout, rank: int, full: dict[str, Array]) -> dict[str, Array]:
    """What an unfused rank keeps: each weight's part under its name."""
    found = {}
    for weight in weights:
        parts = [share.box for share in layout.shares(weight) if rank in share.ranks]
        assert len(parts) <= 1
        if parts:
            found[weight.name] = full[weight.name][slices(parts[0])]
    return found


class EngineRank:
    """One vLLM rank, after vLLM's own rules (QKVParallelLinear, MergedColumnParallelLinear, FusedMoE).

    Args:
        spec, full: the model and its whole tensors.
        tp, t: tensor parallelism and this rank's place in it.
        experts: the experts that it has; ``cut_experts``: each of them cut by tp.
    """

    def __init__(
        self, spec: ModelSpec, full: dict[str, Array], tp: int, t: int, experts: list[int], *, cut_experts: bool
    ) -> None:
        self.spec, self.full, self.tp, self.t = spec, full, tp, t
        self.experts, self.cut_experts = experts, cut_experts

    def layer(self, number: int) -> dict[str, Array]:
        """The layer's fused and cut tensors; whole ones and those of the vocabulary are left out."""
        prefix = f"model.layers.{number}."
        here = {n.removeprefix(prefix): a for n, a in self.full.items() if n.startswith(prefix)}
        found = self._latent(here) if self.spec.mla else self._attention(here)
        for mlp in ("mlp", "mlp.shared_experts"):
            for kind in ("weight", "bias"):
                if f"{mlp}.gate_proj.{kind}" in here:
                    pair = [self._rows(here[f"{mlp}.{x}_proj.{kind}"]) for x in ("gate", "up")]
                    found[f"{mlp}.gate_up_proj.{kind}"] = np.concatenate(pair)
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "mlp.shared_experts.down_proj.weight"):
            if name in here:
                found[name] = self._columns(here[name])
        if self.spec.moe is not None and self.spec.moe.parts and self.spec.is_moe_layer(number):
            found |= self._experts(here)
        return {prefix + name: tensor for name, tensor in found.items()}

    def _rows(self, tensor: Array, parts: int | None = None, index: int | None = None) -> Array:
        parts, index = parts or self.tp, self.t if index is None else index
        size = tensor.shape[0] // parts
        return tensor[index * size : (index + 1) * size]

    def _columns(self, tensor: Array) -> Array:
        return self._rows(tensor.T).T

    def _attention(self, here: dict[str, Array]) -> dict[str, Array]:
        heads = self.spec.kv_heads
        place = (heads, self.t // (self.tp // heads)) if self.tp > heads else (self.tp, self.t)
        return {
            f"self_attn.qkv_proj.{kind}": np.concatenate(
                [self._rows(here[f"self_attn.q_proj.{kind}"])]
                + [self._rows(here[f"self_attn.{x}_proj.{kind}"], *place) for x in "kv"]
            )
            for kind in ("weight", "bias")
            if f"self_attn.q_proj.{kind}" in here
        }

    def _latent(self, here: dict[str, Array]) -> dict[str, Array]:
        names = [n for n in ("q_proj", "q_b_proj", "kv_b_proj") if f"self_attn.{n}.weight" in here]
        found = {f"self_attn.{n}.weight": self._rows(here[f"self_attn.{n}.weight"]) for n in names}
        if "q_proj" not in names:
            pair = [here[f"self_attn.{n}.weight"] for n in ("q_a_proj", "kv_a_proj_with_mqa")]
            found["self_attn.fused_qkv_a_proj.weight"] = np.concatenate(pair)
        return found

    def _experts(self, here: dict[str, Array]) -> dict[str, Array]:
        assert self.spec.moe is not None
        block, (gate, up, down) = self.spec.moe.block, self.spec.moe.parts
        mine = [f"{block}.experts.{e}." for e in self.experts]
        rows, columns = (self._rows, self._columns) if self.cut_experts else (_all, _all)
        wide = [np.concatenate([rows(here[f"{e}{x}.weight"]) for x in (gate, up)]) for e in mine]
        narrow = [columns(here[f"{e}{down}.weight"]) for e in mine]
        if not mine:
            return {}
        path = f"{block}.experts.routed_experts"
        return {f"{path}.w13_weight": np.stack(wide), f"{path}.w2_weight": np.stack(narrow)}


def _all(tensor: Array) -> Array:
    return tensor
