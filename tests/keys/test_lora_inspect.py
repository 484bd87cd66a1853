"""Inspecting an adapter folder: effective scaling, and everything that would make it do nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from rlctl.errors import RlctlError
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import read_contents
from rlctl.keys.lora.inspect import inspect_adapter

Q = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


def folder(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8} | config))
    return path


def layers(count: int = 2, *, b: float = 1.0) -> dict[str, Tensor]:
    tensors = {}
    for i in range(count):
        tensors |= {Q.format(i, "A"): torch.ones(2, 16), Q.format(i, "B"): torch.full((16, 2), b)}
    return tensors


def test_a_sound_adapter_has_its_scaling_and_no_warnings(tmp_path: Path) -> None:
    report = inspect_adapter(folder(tmp_path, layers(), target_modules=["q_proj"], alpha_pattern={"layers.1.*": 3}))
    assert not report.faults
    assert not report.warnings
    assert {row["layer"]: row["scaling"] for row in report.facts["layers"]} == {
        "model.layers.0.self_attn.q_proj": 4.0, "model.layers.1.self_attn.q_proj": 1.5,
    }  # fmt: skip
    json.dumps(report.facts)


def test_all_that_would_do_nothing_is_said(tmp_path: Path) -> None:
    report = inspect_adapter(
        folder(tmp_path, layers(b=0.0), target_modules=["q_proj", "kproj"], alpha_pattern={"^q_proj": 3},
               init_lora_weights="pissa", use_qalora=True)
    )  # fmt: skip
    text = " | ".join(str(finding) for finding in report.warnings)
    assert "no-op: A or B of every layer is all zero" in text
    assert "'^q_proj' matches no module" in text
    assert "'kproj' names no layer" in text
    assert "pissa" in text
    assert any("use_qalora" in note for note in report.notes)


def test_a_compiled_adapter_is_a_fault(tmp_path: Path) -> None:
    report = inspect_adapter(folder(tmp_path, {f"_orig_mod.{n}": t for n, t in layers(1).items()}))
    (fault,) = report.faults
    assert "0 of 2 keys match" in fault.message


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"r": "x"}', '{"r": 2, "lora_alpha": 0}', '{"peft_type": "IA3"}', '{"r": 3}']
)
def test_faults_are_reported_not_raised(text: str, tmp_path: Path) -> None:
    folder(tmp_path, layers())
    (tmp_path / "adapter_config.json").write_text(text)
    assert inspect_adapter(tmp_path).faults


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
