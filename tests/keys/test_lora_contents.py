"""What an adapter holds, from names and shapes: pairing, faults, several adapters in one model, served modules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.errors import CheckError, RlctlError
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import Contents, read_contents
from rlctl.keys.lora.served import check_served, hint
from rlctl.keys.plan import PlanError

Q = "base_model.model.model.layers.0.self_attn.q_proj"
EXPERTS = "base_model.model.model.layers.0.mlp.experts"


def config(**fields: Any) -> AdapterConfig:
    return AdapterConfig.parse({"r": 2, "lora_alpha": 8, **fields})


def pair(path: str = Q, r: int = 2, inputs: int = 16, outputs: int = 16) -> dict[str, tuple[int, ...]]:
    return {f"{path}.lora_A.weight": (r, inputs), f"{path}.lora_B.weight": (outputs, r)}


def fault(shapes: dict[str, tuple[int, ...]], **fields: Any) -> str:
    with pytest.raises(PlanError) as error:
        read_contents(shapes, config(**fields))
    return str(error.value)


def test_a_compiled_adapter_is_cleaned_and_counted() -> None:
    found = read_contents({f"_orig_mod.{name}": shape for name, shape in pair().items()}, config())
    assert found.stripped == 2
    (module,) = found.modules
    assert (module.path, module.scaling.value) == ("model.layers.0.self_attn.q_proj", 4.0)


def test_ungathered_tensors_are_named_with_the_remedy() -> None:
    text = fault({f"{Q}.lora_A.weight": (0,), f"{Q}.lora_B.weight": (4096,)})
    assert f"{Q}.lora_A.weight (0,)" in text
    assert f"{Q}.lora_B.weight (4096,)" in text
    assert "gather before save" in text


def test_magnitudes_are_vectors_and_must_be_there() -> None:
    shapes = pair() | {f"{Q}.lora_magnitude_vector": (16,)}
    (module,) = read_contents(shapes, config(use_dora=True)).modules
    assert module.magnitude == f"{Q}.lora_magnitude_vector"
    assert "lora_magnitude_vector is missing" in fault(pair(), use_dora=True)
    assert "use_dora is not set" in fault(shapes)
    assert "16 elements" in fault(pair() | {f"{Q}.lora_magnitude_vector": (4,)}, use_dora=True)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({f"{Q}.lora_A.weight": (2, 16)}, "lora_B is missing"),
        ({f"{Q}.lora_B.weight": (16, 2)}, "lora_A is missing"),
        (pair(r=4), "configured rank 2"),
        (pair() | {f"{Q}.lora_diag.default": (2,)}, "lora_diag"),
        (pair() | {"base_model.model.model.norm.weight": (16,)}, "unknown tensor"),
        (pair() | {"base_model.model.e.token_adapter.trainable_tokens_delta": (1, 4)}, "trainable_token_indices"),
        (pair() | {f"module.{Q}.lora_A.weight": (2, 16)}, "one tensor once cleaned"),
        ({}, "0 of 0 keys are LoRA tensors"),
        (pair(EXPERTS, r=6), "which expert tensor"),
    ],
)
def test_faults_are_named(shapes: dict[str, tuple[int, ...]], text: str) -> None:
    assert text in fault(shapes)


def test_all_faults_come_at_once() -> None:
    shapes = {f"{Q}.lora_A.weight": (2, 16), f"{EXPERTS}.lora_A.weight": (6, 4), f"{Q}.lora_C.weight": (1, 1)}
    with pytest.raises(PlanError) as error:
        read_contents(shapes, config())
    assert len(error.value.findings) == 4


def in_model(*adapters: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{Q}.base_layer.weight": (16, 16), "base_model.model.model.norm.weight": (16,),
        "base_model.model.lm_head.original_module.weight": (32, 16),
    }  # fmt: skip
    for name in adapters:
        shapes |= {f"{Q}.lora_A.{name}.weight": (2, 16), f"{Q}.lora_B.{name}.weight": (16, 2)}
        shapes[f"base_model.model.lm_head.modules_to_save.{name}.weight"] = (32, 16)
    return shapes


def dropped(found: Contents) -> dict[str, str]:
    return dict(found.dropped)


def test_one_adapter_is_taken_out_of_a_model_and_the_rest_dropped_with_reasons() -> None:
    found = read_contents(in_model("default", "ref"), config(modules_to_save=["lm_head"]))
    assert found.saved == {"lm_head.weight": "base_model.model.lm_head.modules_to_save.default.weight"}
    reasons = dropped(found)
    assert "frozen original" in reasons["base_model.model.lm_head.original_module.weight"]
    assert "'ref'" in reasons["base_model.model.lm_head.modules_to_save.ref.weight"]
    assert "'ref'" in reasons[f"{Q}.lora_A.ref.weight"]
    assert reasons[f"{Q}.base_layer.weight"] == "base weight"
    assert [m.a for m in found.modules] == [f"{Q}.lora_A.default.weight"]


def test_adapters_may_be_named_like_parts_of_paths_and_must_be_chosen_when_ambiguous() -> None:
    shapes = in_model("q_proj", "layers")
    found = read_contents(shapes, config(), adapter="q_proj")
    assert [m.a for m in found.modules] == [f"{Q}.lora_A.q_proj.weight"]
    with pytest.raises(PlanError, match="layers, q_proj"):
        read_contents(shapes, config())
    with pytest.raises(PlanError, match="no adapter 'ref'"):
        read_contents(shapes, config(), adapter="ref")


def test_trained_biases_and_embedding_copies_are_whole_tensors() -> None:
    shapes = pair() | {
        f"{Q}.base_layer.bias": (16,),
        "base_model.model.model.embed_tokens.weight": (32, 16),
        "base_model.model.lm_head.base_layer.weight": (32, 16),
    }
    found = read_contents(shapes, config(bias="lora_only"))
    assert set(found.saved) == {
        "model.layers.0.self_attn.q_proj.bias", "model.embed_tokens.weight", "lm_head.weight",
    }  # fmt: skip
    assert found.saved_shapes["lm_head.weight"] == (32, 16)


def test_stacked_experts_find_their_parameter() -> None:
    gate_up = {f"{EXPERTS}.base_layer.lora_A.weight": (6, 4), f"{EXPERTS}.base_layer.lora_B.weight": (12, 6)}
    down = {f"{EXPERTS}.lora_A.weight": (6, 6), f"{EXPERTS}.lora_B.weight": (4, 6)}
    both = config(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    found = read_contents(gate_up | down, both).modules
    assert {m.parameter: (m.experts, m.inputs, m.outputs) for m in found} == {
        "gate_up_proj": (3, 4, 12), "down_proj": (3, 6, 4),
    }  # fmt: skip
    for only in ("gate_up_proj", "down_proj"):
        (module,) = read_contents(down, config(target_parameters=[f"experts.{only}"])).modules
        assert (module.parameter, module.experts) == (only, 3)
    with pytest.raises(PlanError, match="wrappers at depths"):
        read_contents(down, both)
    (router,) = read_contents(
        pair("base_model.model.model.layers.0.mlp.gate"), config(target_parameters=["gate.weight"])
    ).modules
    assert (router.kind, router.parameter, router.site) == ("linear", "weight", "model.layers.0.mlp.gate.weight")


def test_adapters_that_the_server_does_not_adapt_are_named() -> None:
    with pytest.raises(CheckError, match="0 of 1 adapter modules are active"):
        check_served(["model.layers.0.mlp.down_proj"], ["qkv_proj"])
    with pytest.raises(CheckError, match=r"1 of 2 adapter modules are active; not model\.layers\.0\.mlp\.up_proj"):
        check_served(["model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"], ["down_proj"])
    check_served([f"model.layers.0.self_attn.{x}_proj" for x in "qkv"], ["qkv_proj"])
    check_served(["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"], ["gate_up_proj"])
    with pytest.raises(CheckError, match="lm_head"):
        check_served(["model.unembed_tokens"], ["qkv_proj", "lm_head", "embed_tokens"])


def test_foreign_names_get_a_hint() -> None:
    base = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"]
    assert "'lm_head'" in str(hint("model.unembed_tokens", base))
    assert "'model.layers.0.self_attn.q_proj'" in str(hint("model.layers.0.self_attn.q_prj", base))
    assert hint("zzzz", base) is None


NAME = st.lists(
    st.sampled_from(["base_model", "model", "layers", "0", "q_proj", "experts", "base_layer", "lora_A", "lora_B",
                     "lora_embedding_A", "lora_magnitude_vector", "default", "weight", "bias", "modules_to_save",
                     "original_module", "embed_tokens", "lm_head", "token_adapter", "_orig_mod", "module"]),
    min_size=1, max_size=8,
).map(".".join)  # fmt: skip
SHAPE = st.lists(st.integers(0, 8), max_size=3).map(tuple)
CONFIG = st.fixed_dictionaries(
    {"r": st.integers(1, 4), "lora_alpha": st.integers(1, 4)},
    optional={
        "use_dora": st.booleans(), "bias": st.sampled_from(["none", "all", "lora_only"]),
        "target_parameters": st.lists(
            st.sampled_from(["experts.gate_up_proj", "down_proj", "q_proj.weight"]), max_size=2
        ),
        "modules_to_save": st.lists(st.sampled_from(["lm_head", "model", "0"]), max_size=2),
    },
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(shapes=st.dictionaries(NAME, SHAPE, max_size=8), raw=CONFIG)
def test_no_names_or_shapes_give_a_traceback(shapes: dict[str, tuple[int, ...]], raw: dict[str, Any]) -> None:
    try:
        found = read_contents(shapes, AdapterConfig.parse(raw))
    except RlctlError:
        return
    assert found.modules or found.saved
    for module in found.modules:
        assert shapes[module.a][0] == module.experts * module.scaling.r == shapes[module.b][1]
