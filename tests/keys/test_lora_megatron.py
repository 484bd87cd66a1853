"""Megatron's adapters: names, fused and canonical form, tensor-parallel cuts, and back to PEFT's form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.errors import UsageError
from rlctl.keys.compose import compose
from rlctl.keys.layout import Ref, TensorInfo
from rlctl.keys.live import convert_tensors
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.fusion import interleave_qkv
from rlctl.keys.lora.megatron import Style, from_megatron, to_megatron
from rlctl.keys.lora.megatron_names import linears, parse_megatron_key, strip_to_wrap
from rlctl.keys.lora.megatron_shards import gather, shard
from rlctl.keys.lora.merge import merge_stream
from rlctl.keys.lora.merge_plan import plan_merge
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import PlanError
from rlctl.keys.schemes.hf import canonical_shapes, hf_layout
from rlctl.keys.schemes.megatron import Grid, megatron_layout
from rlctl.keys.shapes import tensor_shapes

DENSE = {
    "model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 12, "vocab_size": 16,
}  # fmt: skip
MOE = {
    "model_type": "qwen2_moe", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 12, "vocab_size": 16, "num_experts": 11, "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10, "decoder_sparse_step": 2,
}  # fmt: skip


def spec(config: dict[str, Any] = DENSE) -> ModelSpec:
    return ModelSpec.from_config(config)


def adapter(shapes: dict[str, tuple[int, int]], *, shared: bool = False, **fields: Any) -> Adapter:
    """A random adapter on modules given as path -> (outputs, inputs); one A for all of one width when ``shared``."""
    config = AdapterConfig.parse({"r": 4, "lora_alpha": 8} | fields)
    one_a = {(inputs, r): torch.randn(r, inputs) for _, inputs in shapes.values() for r in (1, 2, 4)}
    tensors = {}
    for path, (outputs, inputs) in shapes.items():
        r = config.scaling(path).r
        tensors[f"base_model.model.{path}.lora_A.weight"] = (
            one_a[inputs, r].clone() if shared else torch.randn(r, inputs)
        )
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(outputs, r)
    return Adapter.from_tensors(tensors, config)


def dense_shapes(layers: int = 2) -> dict[str, tuple[int, int]]:
    found = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj": (8, 8), f"{at}.self_attn.k_proj": (4, 8), f"{at}.self_attn.v_proj": (4, 8),
            f"{at}.self_attn.o_proj": (8, 8), f"{at}.mlp.gate_proj": (12, 8), f"{at}.mlp.up_proj": (12, 8),
            f"{at}.mlp.down_proj": (8, 12),
        }  # fmt: skip
    return found


def deltas(one: Adapter) -> dict[str, torch.Tensor]:
    return {m.site: one.delta(m) for m in one.contents.modules}


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, atol=2e-5, rtol=1e-5)


def test_names_come_apart_and_bases_lose_their_wrapper() -> None:
    key = parse_megatron_key("decoder.layers.3.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight")
    assert key is not None
    assert (key.linear, key.key, key.side) == ("decoder.layers.3.self_attention.linear_qkv", "q", "in")
    fused = parse_megatron_key("decoder.layers.3.mlp.linear_fc1.adapter.linear_out.weight")
    assert fused is not None
    assert (fused.key, fused.side) == ("", "out")
    assert parse_megatron_key("decoder.layers.3.mlp.linear_fc1.to_wrap.weight") is None
    assert strip_to_wrap("decoder.layers.3.mlp.linear_fc1.to_wrap.weight") == "decoder.layers.3.mlp.linear_fc1.weight"


@pytest.mark.parametrize("shared", [True, False])
def test_fused_deltas_are_megatrons_layout_of_the_projections_deltas(shared: bool) -> None:
    torch.manual_seed(1)
    one = adapter(dense_shapes(), shared=shared)
    laid = to_megatron(one, spec(), "fused")
    assert laid.dim == (4 if shared else 12)
    assert laid.target_modules == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    tensors = dict(laid.tensors())
    assert all("adapter_" not in name for name in tensors)
    right = deltas(one)
    for layer in range(2):

        def product(linear: str, layer: int = layer) -> torch.Tensor:
            at = f"decoder.layers.{layer}.{linear}.adapter"
            b, a = tensors[f"{at}.linear_out.weight"], tensors[f"{at}.linear_in.weight"]
            assert a.shape[0] == laid.dim
            return b @ a * laid.alpha / laid.dim

        here = f"model.layers.{layer}"
        qkv = [right[f"{here}.self_attn.{x}_proj"] for x in "qkv"]
        close({"x": product("self_attention.linear_qkv")}, {"x": interleave_qkv(*qkv, 2)})
        gate_up = torch.cat([right[f"{here}.mlp.{x}_proj"] for x in ("gate", "up")])
        close({"x": product("mlp.linear_fc1")}, {"x": gate_up})
        close({"x": product("mlp.linear_fc2")}, {"x": right[f"{here}.mlp.down_proj"]})


@settings(max_examples=30, deadline=None)
@given(
    style=st.sampled_from(["fused", "canonical"]), shared=st.booleans(), blocks=st.booleans(), seed=st.integers(0, 999),
    drop=st.sets(st.sampled_from(sorted(dense_shapes())), max_size=8), tp=st.sampled_from([1, 2]),
    patterns=st.booleans(), rslora=st.booleans(),
)  # fmt: skip
def test_forth_and_back_keeps_every_delta(
    style: Style, shared: bool, blocks: bool, seed: int, drop: set[str], tp: int, patterns: bool, rslora: bool
) -> None:
    torch.manual_seed(seed)
    fields: dict[str, Any] = {"use_rslora": rslora}
    if patterns:
        fields |= {"rank_pattern": {"layers.1.mlp.up_proj": 2}, "alpha_pattern": {"q_proj": 3}}
    one = adapter({p: s for p, s in dense_shapes().items() if p not in drop}, shared=shared, **fields)
    laid = to_megatron(one, spec(), style)
    known = {linear.name: linear for linear in linears(spec())}
    tensors = {}
    for name, tensor in laid.tensors():
        key = parse_megatron_key(name)
        assert key is not None
        cut = shard(known[key.linear], key, tensor, tp)
        assert len(cut) == tp
        tensors[name] = gather(known[key.linear], key, cut)
        assert torch.equal(tensors[name], tensor)
    back = from_megatron(tensors, spec(), alpha=laid.alpha, blocks=blocks)
    found = {n: t for n, t in deltas(back).items() if n not in drop}
    close(found, deltas(one))
    for name in set(deltas(back)) & drop:
        assert not deltas(back)[name].any()
    if style == "fused" and not shared and blocks and not drop and not patterns:
        assert {m.scaling.r for m in back.contents.modules if "q_proj" in m.path} == {laid.dim // 3}
    again = AdapterConfig.parse(back.config.to_dict())
    assert all(again.scaling(m.site) == m.scaling for m in back.contents.modules)


def test_experts_of_both_forms_go_to_grouped_layers_and_back() -> None:
    torch.manual_seed(3)
    shapes = {"model.layers.1.mlp.shared_expert.down_proj": (8, 10), "model.layers.1.mlp.gate": (11, 8)}
    for e in range(11):
        at = f"model.layers.1.mlp.experts.{e}"
        shapes |= {f"{at}.gate_proj": (6, 8), f"{at}.up_proj": (6, 8), f"{at}.down_proj": (8, 6)}
    single = adapter(shapes)
    laid = to_megatron(single, spec(MOE), "canonical")
    tensors = dict(laid.tensors())
    fc1 = "decoder.layers.1.mlp.experts.linear_fc1.adapter"
    assert tensors[f"{fc1}.linear_in.weight"].shape == (11, laid.dim, 8)
    assert tensors[f"{fc1}.linear_out.weight"].shape == (11, 12, laid.dim)
    right = deltas(single)
    for e in range(11):
        product = tensors[f"{fc1}.linear_out.weight"][e] @ tensors[f"{fc1}.linear_in.weight"][e] * laid.alpha / laid.dim
        at = f"model.layers.1.mlp.experts.{e}"
        close({"x": product}, {"x": torch.cat([right[f"{at}.gate_proj"], right[f"{at}.up_proj"]])})
    back = from_megatron(tensors, spec(MOE), alpha=laid.alpha)
    stacked = deltas(back)
    assert stacked["model.layers.1.mlp.experts.gate_up_proj"].shape == (11, 12, 8)
    torch.testing.assert_close(
        stacked["model.layers.1.mlp.experts.down_proj"][10], right["model.layers.1.mlp.experts.10.down_proj"],
        atol=2e-5, rtol=1e-5,
    )  # fmt: skip
    assert {m.parameter: m.depth for m in back.contents.modules if m.parameter} == {"gate_up_proj": 1, "down_proj": 0}
    assert "model.layers.1.mlp.gate" in stacked


def test_one_adapter_for_all_experts_of_a_rank_is_read_as_each_experts() -> None:
    fc2 = "decoder.layers.1.mlp.experts.linear_fc2.adapter"
    a, b = torch.randn(2, 6), torch.randn(8, 2)
    back = from_megatron({f"{fc2}.linear_in.weight": a, f"{fc2}.linear_out.weight": b}, spec(MOE), alpha=4)
    (module,) = back.contents.modules
    assert (module.parameter, module.experts, module.depth) == ("down_proj", 11, 0)
    torch.testing.assert_close(back.delta(module)[7], 2 * b @ a)


def test_what_megatron_has_no_place_for_is_named() -> None:
    with pytest.raises(PlanError, match=r"model\.vision\.fc"):
        to_megatron(adapter({"model.vision.fc": (8, 8)}), spec(), "fused")
    with pytest.raises(PlanError, match="no such linear layer"):
        from_megatron({"decoder.layers.9.mlp.linear_fc2.adapter.linear_in.weight": torch.ones(1, 1)}, spec(), alpha=1)
    with pytest.raises(PlanError, match="linear_in without its partner"):
        from_megatron({"decoder.layers.0.mlp.linear_fc2.adapter.linear_in.weight": torch.ones(1, 1)}, spec(), alpha=1)
    with pytest.raises(PlanError, match="DoRA"):
        from_megatron({"decoder.layers.0.mlp.linear_fc2.adapter.weight_magnitude": torch.ones(1)}, spec(), alpha=1)
    with pytest.raises(PlanError, match="0 of 1 keys"):
        from_megatron({"decoder.layers.0.mlp.linear_fc2.to_wrap.weight": torch.ones(1)}, spec(), alpha=1)
    with pytest.raises(UsageError, match="different A's"):
        to_megatron(adapter(dense_shapes()), spec(), "fused", blocks=False)


def test_cuts_that_do_not_divide_are_refused_and_gate_and_up_are_cut_one_by_one() -> None:
    known = {linear.name: linear for linear in linears(spec())}
    fc1 = known["decoder.layers.0.mlp.linear_fc1"]
    key = parse_megatron_key("decoder.layers.0.mlp.linear_fc1.adapter.linear_out.weight")
    inner = parse_megatron_key("decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight")
    assert key is not None
    assert inner is not None
    first, second = shard(fc1, key, torch.tensor([[0.0], [1], [2], [3], [10], [11], [12], [13]]), 2)
    assert first.flatten().tolist() == [0, 1, 10, 11]
    assert second.flatten().tolist() == [2, 3, 12, 13]
    with pytest.raises(UsageError, match="rank 3 of the adapter"):
        shard(fc1, inner, torch.ones(3, 8), 2)


def megatron_weights(model: ModelSpec, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert a whole Hugging Face model to Megatron names at TP 1 (the layout that Megatron-core itself loads)."""
    shapes = canonical_shapes(model)
    infos = {Ref(name): TensorInfo(tuple(t.shape), "F32") for name, t in tensors.items()}
    plan = compose(hf_layout(model, shapes), megatron_layout(model, shapes, Grid()), infos)
    return {ref.name: tensor for ref, tensor in convert_tensors(plan, tensors)}


@pytest.mark.parametrize("style", ["fused", "canonical"])
def test_megatrons_base_and_adapter_add_up_to_the_converted_merge(style: Style) -> None:
    torch.manual_seed(9)
    model = spec(DENSE | {"tie_word_embeddings": False})
    base = {name: torch.randn(shape) for name, shape in tensor_shapes(model).items()}
    one = adapter(dense_shapes())
    plan = plan_merge(one.contents, one.config, {n: tuple(t.shape) for n, t in base.items()})
    right = megatron_weights(model, dict(merge_stream(base.items(), one, plan)))
    before = megatron_weights(model, base)
    laid = to_megatron(one, model, style)
    tensors = dict(laid.tensors())
    for linear in linears(model):
        if f"{linear.name}.weight" not in before or linear.name == "output_layer":
            continue
        if style == "fused" or len(linear.modules) == 1:
            at = f"{linear.name}.adapter"
            delta = tensors[f"{at}.linear_out.weight"] @ tensors[f"{at}.linear_in.weight"]
        else:
            ats = [f"{linear.name}.adapter.adapter_{key}" for key in linear.keys]
            parts = [tensors[f"{at}.linear_out.weight"] @ tensors[f"{at}.linear_in.weight"] for at in ats]
            delta = interleave_qkv(*parts, model.kv_heads) if len(parts) == 3 else torch.cat(parts)
        added = before[f"{linear.name}.weight"] + delta * laid.alpha / laid.dim
        torch.testing.assert_close(added, right[f"{linear.name}.weight"], atol=2e-5, rtol=1e-5, msg=linear.name)


@pytest.mark.parametrize("q_rank", [None, 6])
def test_latent_attention_has_its_own_linear_layers(q_rank: int | None) -> None:
    model = spec({
        "model_type": "deepseek_v3", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 12, "vocab_size": 16, "n_routed_experts": 3,
        "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 4, "first_k_dense_replace": 1,
        "q_lora_rank": q_rank, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
    })  # fmt: skip
    shapes = {n.removesuffix(".weight"): s for n, s in tensor_shapes(model).items() if n.endswith("_proj.weight")}
    shapes |= {n.removesuffix(".weight"): s for n, s in tensor_shapes(model).items() if "_with_mqa" in n}
    one = adapter({n: (s[0], s[1]) for n, s in shapes.items()})
    laid = to_megatron(one, model, "fused")
    tensors = dict(laid.tensors())
    names = {name.split(".adapter")[0].rpartition(".")[2] for name in tensors if "self_attention" in name}
    query = {"linear_q_proj"} if q_rank is None else {"linear_q_down_proj", "linear_q_up_proj"}
    assert names == {"linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"} | query
    back = deltas(from_megatron(tensors, model, alpha=laid.alpha))
    for name, value in deltas(one).items():
        if ".experts." not in name:
            torch.testing.assert_close(back[name], value, atol=2e-5, rtol=1e-5)
