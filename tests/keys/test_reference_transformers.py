"""transformers loads what was converted, misses and rejects no name, and computes the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.keys.convert import Conversion, prepare
from rlctl.keys.plan import PlanError
from tests.keys.tiny_models import MODELS, MORE, add_prediction_layer, load, logits, save


def convert(source: Path, target: Path, to: str, **options: Any) -> dict[str, Any]:
    return prepare(Conversion(source, to, **options)).write(target, verify=True)


@pytest.mark.parametrize("model_type", MODELS)
def test_converted_folders_load_and_agree(model_type: str, tmp_path: Path) -> None:
    model = save(model_type, tmp_path / "hf")
    right = logits(model)
    expert_parallel = 2 if model_type in ("qwen2_moe", "qwen3_moe", "mixtral") else 1
    convert(tmp_path / "hf", tmp_path / "fused", "hf-fused")
    convert(tmp_path / "fused", tmp_path / "megatron", "megatron", tp=2, pp=2, ep=expert_parallel)
    convert(tmp_path / "megatron", tmp_path / "vllm", "vllm")
    convert(tmp_path / "megatron", tmp_path / "back", "hf", max_shard_bytes=30_000)
    for name in ("fused", "back", "vllm"):
        assert (logits(load(tmp_path / name)) - right).abs().max() <= 1e-5
    assert right.abs().max() > 0.1


@pytest.mark.parametrize("model_type", MORE)
def test_further_architectures_load_and_agree(model_type: str, tmp_path: Path) -> None:
    model = save(model_type, tmp_path / "hf")
    right = logits(model)
    way = ["hf-fused", "vllm", "hf"]
    if model_type == "deepseek_v3":
        way.insert(1, "megatron")
    source = tmp_path / "hf"
    for to in way:
        convert(source, tmp_path / f"to-{to}", to, **({"tp": 2, "ep": 4} if to == "megatron" else {}))
        source = tmp_path / f"to-{to}"
    for to in ("hf-fused", "hf"):
        loaded = load(tmp_path / f"to-{to}")
        assert (logits(loaded) - right).abs().max() <= 1e-5
        state, again = model.state_dict(), loaded.state_dict()
        assert state.keys() == again.keys()
        assert all(torch.equal(state[name], again[name]) for name in state)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_the_stacked_form_is_that_of_transformers_itself(model_type: str, tmp_path: Path) -> None:
    model = save(model_type, tmp_path / "hf")
    model.save_pretrained(tmp_path / "own", save_original_format=False)
    convert(tmp_path / "hf", tmp_path / "ours", "hf-fused")
    from safetensors.torch import load_file

    own = load_file(tmp_path / "own" / "model.safetensors")
    ours: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "ours").glob("*.safetensors"):
        ours |= load_file(file)
    assert own.keys() == ours.keys()
    assert all(torch.equal(own[name], ours[name]) for name in own)


def test_the_multi_token_prediction_layer_goes_along(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save("deepseek_v3", tmp_path / "hf")
    weights = add_prediction_layer(tmp_path / "hf")
    there = convert(tmp_path / "hf", tmp_path / "mg", "megatron", tp=2, pp=2, ep=4)
    reasons = {one["name"]: one["reason"].partition(" (")[0] for one in there["dropped"]}
    copies = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
    assert reasons == dict.fromkeys(copies, "a copy for the prediction layer")
    convert(tmp_path / "mg", tmp_path / "back", "hf")
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    # A copy that is no copy would be lost.
    weights["model.layers.2.shared_head.head.weight"] += 1
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError, match=r"a copy for the prediction layer of lm_head\.weight, but its values differ"):
        convert(tmp_path / "hf", tmp_path / "none", "megatron")
