"""transformers loads what was converted, misses and rejects no name, and computes the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import UsageError
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


def test_fp8_blocks_keep_their_scales(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save("deepseek_v3", tmp_path / "hf", shard="1GB")
    file = tmp_path / "hf" / "model.safetensors"
    weights = load_file(file)
    for name in [n for n, t in weights.items() if ".self_attn." in n and t.dim() == 2]:
        rows, columns = weights[name].shape
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.rand(-(-rows // 16), -(-columns // 16))
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(PlanError, match="unknown name"):
        convert(tmp_path / "hf", tmp_path / "out", "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    convert(tmp_path / "hf", tmp_path / "out", "vllm")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[n].view(torch.uint8), again[n].view(torch.uint8)) for n in weights)
    with pytest.raises(UsageError, match="fp8 blocks have no place in the megatron form"):
        convert(tmp_path / "hf", tmp_path / "none", "megatron")
    with pytest.raises(PlanError, match=r"is quantised .F8_E4M3.; a cast without its scales would be wrong"):
        convert(tmp_path / "hf", tmp_path / "none", "hf", dtype="BF16")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UsageError, match="quantised by 'awq', which is not supported"):
        convert(tmp_path / "hf", tmp_path / "none", "hf")
