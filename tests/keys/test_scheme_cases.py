"""Small inputs with known right values: interleaving, expert order, stacked experts, tied heads, unknown names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlctl.errors import UsageError
from rlctl.keys.compose import compose
from rlctl.keys.layout import Layout, Ref, TensorInfo
from rlctl.keys.live import convert_tensors
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import Plan, PlanError
from rlctl.keys.schemes.hf import canonical_shapes, fused_layout, hf_layout
from rlctl.keys.schemes.megatron import Grid, megatron_layout
from rlctl.keys.schemes.vllm_names import vllm_names_layout
from rlctl.keys.wrappers import clean_names, strip


def tiny(model_type: str = "qwen2", **changes: Any) -> ModelSpec:
    config = {
        "model_type": model_type,
        "hidden_size": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 1,
        "intermediate_size": 2,
        "vocab_size": 3,
    }
    return ModelSpec.from_config(config | changes)


def tensors_for(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in shapes.items()}


def plan_of(source: Layout, target: Layout, tensors: dict[str, torch.Tensor]) -> Plan:
    refs = {str(ref): ref for ref in source.stored}
    infos = {refs.get(name, Ref(name)): TensorInfo(tuple(t.shape), "F32") for name, t in tensors.items()}
    return compose(source, target, infos)


def run(source: Layout, target: Layout, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(ref): t for ref, t in convert_tensors(plan_of(source, target, tensors), tensors)}


@pytest.mark.parametrize(
    ("groups", "right"),
    [
        (2, [0, 1, 10, 20, 2, 3, 11, 21]),
        (4, [0, 10, 20, 1, 11, 21, 2, 12, 22, 3, 13, 23]),  # every head its own group
        (1, [0, 1, 2, 3, 10, 20]),
    ],
)
def test_qkv_is_interleaved_by_group(groups: int, right: list[int]) -> None:
    spec = tiny(num_key_value_heads=groups)
    shapes = canonical_shapes(spec)
    tensors = tensors_for(shapes)
    at = "model.layers.0.self_attn."
    for name, first, count in (("q_proj", 0, 4), ("k_proj", 10, groups), ("v_proj", 20, groups)):
        values = torch.arange(first, first + count, dtype=torch.float32)
        tensors[f"{at}{name}.weight"], tensors[f"{at}{name}.bias"] = values[:, None], values
    hf, megatron = hf_layout(spec, shapes), megatron_layout(spec, shapes, Grid())
    ranks = run(hf, megatron, tensors)
    fused = "mp_rank_00:decoder.layers.0.self_attention.linear_qkv."
    assert ranks[fused + "weight"][:, 0].tolist() == right
    assert ranks[fused + "bias"].tolist() == right
    again = run(megatron, hf, ranks)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_gate_and_up_stay_together_on_every_rank() -> None:
    spec = tiny(intermediate_size=4)
    shapes = canonical_shapes(spec)
    tensors = tensors_for(shapes)
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.tensor([[0.0], [1], [2], [3]])
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.tensor([[10.0], [11], [12], [13]])
    ranks = run(hf_layout(spec, shapes), megatron_layout(spec, shapes, Grid(tp=2)), tensors)
    held = [ranks[f"mp_rank_0{r}:decoder.layers.0.mlp.linear_fc1.weight"][:, 0].tolist() for r in (0, 1)]
    assert held == [[0, 1, 10, 11], [2, 3, 12, 13]]


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_twelve_experts_in_twelve_layers_keep_their_order(ep: int) -> None:
    spec = tiny("qwen3_moe", num_experts=12, moe_intermediate_size=2, hidden_size=2, num_hidden_layers=12)
    shapes = canonical_shapes(spec)
    tensors = tensors_for(shapes)
    for layer in range(12):
        for e in range(12):
            tensors[f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight"] = torch.full((2, 2), 100.0 * layer + e)
    hf, fused = hf_layout(spec, shapes), fused_layout(spec, shapes)
    stacked = run(hf, fused, dict(reversed(tensors.items())))
    megatron = megatron_layout(spec, shapes, Grid(pp=2, ep=ep))
    ranks = run(fused, megatron, stacked)
    for layer in range(12):
        down = stacked[f"model.layers.{layer}.mlp.experts.down_proj"]
        assert down[:, 0, 0].tolist() == [100.0 * layer + e for e in range(12)]
        stage, local = divmod(layer, 6)
        for e in range(12):
            rank, at = divmod(e, 12 // ep)
            folder = f"mp_rank_00_{stage:03d}" + (f"_{rank:03d}" if ep > 1 else "")
            held = ranks[f"{folder}:decoder.layers.{local}.mlp.experts.linear_fc2.weight{at}"]
            assert held.unique().tolist() == [100.0 * layer + e]
    again = run(megatron, hf, dict(sorted(ranks.items())))  # string order, where 10 comes before 2
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_stacked_experts_come_apart() -> None:
    spec = tiny("qwen3_moe", num_experts=3, moe_intermediate_size=6, hidden_size=16)
    shapes = canonical_shapes(spec)
    v5 = fused_layout(spec, shapes)
    tensors = {str(ref): torch.randn(s.shape) for ref, s in v5.stored.items()}
    apart = run(v5, hf_layout(spec, shapes), tensors)
    block = "model.layers.0.mlp."
    gate_up, down = tensors[f"{block}experts.gate_up_proj"], tensors[f"{block}experts.down_proj"]
    assert gate_up.shape == (3, 12, 16)
    assert down.shape == (3, 16, 6)
    for e in range(3):
        assert torch.equal(apart[f"{block}experts.{e}.gate_proj.weight"], gate_up[e, :6])
        assert torch.equal(apart[f"{block}experts.{e}.up_proj.weight"], gate_up[e, 6:])
        assert torch.equal(apart[f"{block}experts.{e}.down_proj.weight"], down[e])
    assert torch.equal(apart[f"{block}gate.weight"], tensors[f"{block}gate.weight"])
    plan = plan_of(v5, hf_layout(spec, shapes), tensors | {"model.layers.0.mlp.experts.w13": torch.zeros(3, 2, 2)})
    assert [str(ref) for ref in plan.unknown] == ["model.layers.0.mlp.experts.w13"]
    with pytest.raises(PlanError, match=r"experts\.w13: unknown name"):
        plan.check()


TIED = tiny(tie_word_embeddings=True)
TIED_SHAPES = canonical_shapes(TIED)
TIED_HF = hf_layout(TIED, TIED_SHAPES)
EMBEDDING = "model.embed_tokens.weight"


def test_tied_head_both_and_equal_is_written_once() -> None:
    tensors = tensors_for(TIED_SHAPES)
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
    plan = plan_of(TIED_HF, TIED_HF, tensors)
    assert [(str(d.source), d.reason) for d in plan.dropped] == [
        ("lm_head.weight", "tied to the embedding (equal to model.embed_tokens.weight)")
    ]
    written = run(TIED_HF, TIED_HF, tensors)
    assert "lm_head.weight" not in written
    assert torch.equal(written[EMBEDDING], tensors[EMBEDDING])
    again = {str(ref): t for ref, t in convert_tensors(plan.inverse(), written)}
    assert torch.equal(again["lm_head.weight"], tensors["lm_head.weight"])


def test_tied_head_both_and_different_is_an_error() -> None:
    tensors = tensors_for(TIED_SHAPES)
    tensors["lm_head.weight"] = tensors[EMBEDDING] + 1
    with pytest.raises(PlanError, match="tied in config but tensors differ"):
        run(TIED_HF, TIED_HF, tensors)


def test_tied_head_only_the_head_is_renamed_and_said() -> None:
    tensors = tensors_for(TIED_SHAPES)
    tensors["lm_head.weight"] = tensors.pop(EMBEDDING)
    plan = plan_of(TIED_HF, TIED_HF, tensors)
    assert any("lm_head.weight stands in for model.embed_tokens.weight" in note for note in plan.notes)
    assert torch.equal(run(TIED_HF, TIED_HF, tensors)[EMBEDDING], tensors["lm_head.weight"])


def test_tied_head_only_the_embedding_is_fine() -> None:
    tensors = tensors_for(TIED_SHAPES)
    plan = plan_of(TIED_HF, TIED_HF, tensors)
    assert (plan.findings, plan.dropped) == ([], [])


def test_tied_head_megatron_last_stage_keeps_a_copy() -> None:
    spec = tiny(tie_word_embeddings=True, num_hidden_layers=2)
    shapes = canonical_shapes(spec)
    tensors = tensors_for(shapes)
    one, two = megatron_layout(spec, shapes, Grid()), megatron_layout(spec, shapes, Grid(pp=2))
    hf = hf_layout(spec, shapes)
    assert not any("output_layer" in name for name in run(hf, one, tensors))
    ranks = run(hf, two, tensors)
    assert torch.equal(ranks["mp_rank_00_001:output_layer.weight"][:3], tensors[EMBEDDING])
    again = run(two, hf, ranks)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    ranks["mp_rank_00_001:output_layer.weight"] = ranks["mp_rank_00_001:output_layer.weight"] + 1
    with pytest.raises(PlanError, match="tied in config but tensors differ"):
        run(two, hf, ranks)


def test_missing_misshapen_and_replica_faults_are_all_named() -> None:
    spec = tiny("llama")
    shapes = canonical_shapes(spec)
    tensors = tensors_for(shapes)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(5, 1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    plan = plan_of(hf_layout(spec, shapes), hf_layout(spec, shapes), tensors)
    text = "\n".join(map(str, plan.findings))
    assert "model.norm.weight: is missing" in text
    assert "has shape [5, 1], but this model's hf form needs [2, 1]" in text
    assert [d.reason for d in plan.dropped] == ["a buffer that is recomputed from the configuration"]

    ranks = run(hf_layout(spec, shapes), megatron_layout(spec, shapes, Grid(tp=2)), tensors_for(shapes))
    norm = "mp_rank_01:decoder.final_layernorm.weight"
    ranks[norm] = ranks[norm] + 1
    with pytest.raises(PlanError, match=r"a replica of mp_rank_00:.*, but its values differ"):
        run(megatron_layout(spec, shapes, Grid(tp=2)), hf_layout(spec, shapes), ranks)


def test_sizes_that_do_not_divide_are_listed_together() -> None:
    spec = tiny("qwen3_moe", num_experts=6, moe_intermediate_size=4, num_hidden_layers=4)
    with pytest.raises(UsageError) as error:
        megatron_layout(spec, canonical_shapes(spec), Grid(tp=3, pp=3, ep=4))
    text = str(error.value)
    assert "--pp: num_hidden_layers 4 cannot be cut into 3; valid: 1, 2, 4" in text
    assert "--tp: num_key_value_heads 2 cannot be cut into 3; valid: 1, 2" in text
    assert "--ep: the number of experts 6 cannot be cut into 4; valid: 1, 2, 3, 6" in text
    with pytest.raises(UsageError, match="gpt_oss has no megatron form"):
        spec = tiny("gpt_oss", num_local_experts=2)
        megatron_layout(spec, canonical_shapes(spec), Grid())


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("_fsdp_wrapped_module.model._fsdp_wrapped_module.layers.0.w", "model.layers.0.w"),
        ("module.module.model.layers.0.w", "model.layers.0.w"),
        ("module._orig_mod.module.model.x", "model.x"),
        ("_orig_mod.model.layers.0._checkpoint_wrapped_module._orig_mod.mlp.w", "model.layers.0.mlp.w"),
        ("base_model.q_proj.lora_A.default._fsdp_wrapped_module.weight", "base_model.q_proj.lora_A.default.weight"),
        ("model.module.inner.w", "model.module.inner.w"),  # may be a real submodule
        ("module", "module"),
        ("model.layers.0.w", "model.layers.0.w"),
    ],
)
def test_wrapper_segments(name: str, clean: str) -> None:
    assert strip(name) == clean
    assert strip(clean) == clean


def test_wrapper_faults() -> None:
    cleaned = clean_names(["module.a.w", "_orig_mod.a.w", "_fsdp_wrapped_module._flat_param", "b"])
    assert cleaned.stripped == 3
    text = "\n".join(map(str, cleaned.findings))
    assert "_orig_mod.a.w: becomes a.w, as module.a.w does" in text
    assert "_flat_param: a flat FSDP1 parameter" in text


VISION_CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 4, "vocab_size": 6,
    },
    "vision_config": {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 4, "out_hidden_size": 8,
                      "patch_size": 2},
}  # fmt: skip
VISION = ModelSpec.from_config(VISION_CONFIG)
VISION_SHAPES = canonical_shapes(VISION)


def served_names(form: Layout) -> dict[str, torch.Tensor]:
    tensors = {str(ref): torch.randn(stored.shape) for ref, stored in form.stored.items()}
    return run(form, vllm_names_layout(VISION, VISION_SHAPES), tensors)


def test_old_vision_names() -> None:
    old = hf_layout(VISION, VISION_SHAPES)
    up, qkv = "layers.0.mlp.up_proj.weight", "visual.blocks.0.attn.qkv.weight"
    assert {f"model.{up}", qkv, "lm_head.weight"} < {str(ref) for ref in old.stored}
    made = served_names(old)
    assert {f"language_model.model.{up}", qkv, "language_model.lm_head.weight"} < made.keys()
    assert len(made) == len(old.stored)


def test_new_vision_names() -> None:
    new = fused_layout(VISION, VISION_SHAPES)
    up, qkv = "language_model.layers.0.mlp.up_proj.weight", "visual.blocks.0.attn.qkv.weight"
    assert {f"model.{up}", f"model.{qkv}", "lm_head.weight"} < {str(ref) for ref in new.stored}
    assert served_names(new).keys() == served_names(hf_layout(VISION, VISION_SHAPES)).keys()


def test_vision_names_twice_are_vision_names_once() -> None:
    served = vllm_names_layout(VISION, VISION_SHAPES)
    made = served_names(served)
    assert made.keys() == {str(ref) for ref in served.stored}
    assert not any("language_model.language_model." in name for name in made)
    assert {row["transforms"][0] for row in plan_of(served, served, made).rows()} == {"copy"}


def test_a_model_of_text_alone_keeps_its_names() -> None:
    spec = tiny("qwen2")
    shapes = canonical_shapes(spec)
    assert {str(ref) for ref in vllm_names_layout(spec, shapes).stored} == shapes.keys()
