"""Names of LoRA tensors, from every place they come from and to every place they go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.errors import CheckError, UsageError
from rlctl.keys.lora.contents import check_file_names
from rlctl.keys.lora.names import AdapterKey, Part, format_key, parse_key

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (f"base_model.model.{Q}.lora_A.default.weight", AdapterKey(Q, Part.A, "default")),
        (f"base_model.model.{Q}.lora_B.weight", AdapterKey(Q, Part.B)),
        (f"{Q}.lora_B.weight", AdapterKey(Q, Part.B)),
        (f"_orig_mod.base_model.model.{Q}.lora_A.weight", AdapterKey(Q, Part.A)),
        (
            f"module.module.base_model.model.{Q}.lora_A.q_proj._fsdp_wrapped_module.weight",
            AdapterKey(Q, Part.A, "q_proj"),
        ),
        (f"base_model.model.{Q}.lora_A.lora_A.weight", AdapterKey(Q, Part.A, "lora_A")),
        (f"base_model.model.{Q}.lora_A.weight.weight", AdapterKey(Q, Part.A, "weight")),
        (f"base_model.model.{Q}.lora_B.default.bias", AdapterKey(Q, Part.B_BIAS, "default")),
        (f"base_model.model.{Q}.base_layer.weight", AdapterKey(Q, Part.BASE, depth=1, leaf="weight")),
        (f"base_model.model.{Q}.base_layer.bias", AdapterKey(Q, Part.BASE, depth=1, leaf="bias")),
        ("base_model.model.model.norm.weight", AdapterKey("model.norm", Part.BASE, leaf="weight")),
        (f"base_model.model.{EXPERTS}.base_layer.lora_A.default.weight", AdapterKey(EXPERTS, Part.A, "default", 1)),
        (f"base_model.model.{EXPERTS}.lora_A.weight", AdapterKey(EXPERTS, Part.A)),
        (
            f"base_model.model.{EXPERTS}.base_layer.base_layer.gate_up_proj",
            AdapterKey(EXPERTS, Part.BASE, depth=2, leaf="gate_up_proj"),
        ),
        ("base_model.model.e.lora_embedding_A.default", AdapterKey("e", Part.EMBEDDING_A, "default")),
        ("base_model.model.e.lora_embedding_B", AdapterKey("e", Part.EMBEDDING_B)),
        (f"base_model.model.{Q}.lora_magnitude_vector.default.weight", AdapterKey(Q, Part.MAGNITUDE, "default")),
        (f"base_model.model.{Q}.lora_magnitude_vector.default", AdapterKey(Q, Part.MAGNITUDE, "default")),
        (f"base_model.model.{Q}.lora_magnitude_vector", AdapterKey(Q, Part.MAGNITUDE)),
        ("base_model.model.lm_head.original_module.weight", AdapterKey("lm_head", Part.ORIGINAL, leaf="weight")),
        (
            "base_model.model.lm_head.modules_to_save.ref.weight",
            AdapterKey("lm_head", Part.SAVED, "ref", leaf="weight"),
        ),
        (
            "base_model.model.score.modules_to_save.default.dense.weight",
            AdapterKey("score", Part.SAVED, "default", leaf="dense.weight"),
        ),
        (
            "base_model.model.e.token_adapter.trainable_tokens_delta",
            AdapterKey("e", Part.TOKENS, leaf="trainable_tokens_delta"),
        ),
        (f"base_model.model.{Q}.lora_diag.default", AdapterKey(f"{Q}.lora_diag.default", Part.UNKNOWN)),
    ],
)
def test_names_come_apart(raw: str, key: AdapterKey) -> None:
    assert parse_key(raw) == key


@pytest.mark.parametrize("adapter", ["default", "q_proj", "layers", "lora_B", "weight"])
@pytest.mark.parametrize(
    "key",
    [AdapterKey(Q, Part.A), AdapterKey(Q, Part.B), AdapterKey(EXPERTS, Part.B, depth=1), AdapterKey(Q, Part.MAGNITUDE),
     AdapterKey("model.embed_tokens", Part.EMBEDDING_A), AdapterKey("lm_head", Part.SAVED, leaf="weight"),
     AdapterKey(Q, Part.B_BIAS)],
)  # fmt: skip
def test_in_model_names_and_file_names_read_back(key: AdapterKey, adapter: str) -> None:
    back = parse_key(format_key(key, "peft-in-model", adapter=adapter))
    assert back == AdapterKey(key.path, key.part, adapter, key.depth, key.leaf)
    if key.part is not Part.SAVED:
        assert parse_key(format_key(key, "peft-file")) == key


def test_targets_refuse_what_they_have_no_place_for() -> None:
    with pytest.raises(UsageError, match="magnitude"):
        format_key(AdapterKey(Q, Part.MAGNITUDE), "vllm-lora")
    with pytest.raises(UsageError, match="plain Hugging Face"):
        format_key(AdapterKey(Q, Part.A), "hf")
    with pytest.raises(UsageError, match="adapter file"):
        format_key(AdapterKey(Q, Part.BASE, leaf="weight"), "peft-file")
    assert format_key(AdapterKey(EXPERTS, Part.BASE, depth=2, leaf="down_proj"), "hf") == f"{EXPERTS}.down_proj"


def test_compiled_names_fail_the_file_check_and_clean_ones_pass() -> None:
    clean = [f"base_model.model.{Q}.lora_{x}.weight" for x in "AB"]
    check_file_names(clean)
    with pytest.raises(CheckError, match=r"0 of 2 keys match"):
        check_file_names([f"_orig_mod.{name}" for name in clean])
    with pytest.raises(CheckError, match=r"0 of 2 keys match"):
        check_file_names([name.removeprefix("base_model.model.") for name in clean])
    with pytest.raises(CheckError, match=r"1 of 2 keys match"):
        check_file_names([clean[0], f"base_model.model.{Q}.lora_B.default.weight"])


SEGMENT = st.sampled_from(
    ["base_model", "model", "module", "layers", "0", "lora_A", "lora_B", "default", "weight", "bias", "base_layer",
     "modules_to_save", "original_module", "lora_magnitude_vector", "lora_embedding_A", "_orig_mod",
     "token_adapter", ""]
)  # fmt: skip


WRAPPERS = {"modules_to_save", "original_module", "token_adapter"}


@given(st.lists(SEGMENT, min_size=1, max_size=9))
def test_any_name_is_read_and_what_is_written_reads_back(segments: list[str]) -> None:
    key = parse_key(".".join(segments))
    try:
        file = format_key(key, "peft-file")
    except UsageError:
        return
    again = parse_key(file)
    if WRAPPERS & set(key.path.split(".")):  # no module is named like a wrapper's own segment
        return
    assert key.part is Part.SAVED or (again.part, again.path) == (key.part, key.path) or not key.path


def test_whole_parameters_are_named_in_a_model() -> None:
    base = AdapterKey(EXPERTS, Part.BASE, depth=2, leaf="down_proj")
    assert format_key(base, "peft-in-model") == f"base_model.model.{EXPERTS}.base_layer.base_layer.down_proj"
    original = AdapterKey("lm_head", Part.ORIGINAL, leaf="weight")
    assert format_key(original, "peft-in-model") == "base_model.model.lm_head.original_module.weight"
    assert format_key(AdapterKey("", Part.BASE, leaf="scale"), "peft-in-model") == "base_model.model.scale"
    with pytest.raises(UsageError, match="cannot name"):
        format_key(AdapterKey("x", Part.UNKNOWN), "peft-in-model")
