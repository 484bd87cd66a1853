"""Adapters through ``rlctl convert-keys``: cleaned, exported, merged on the way, inspected, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.keys.conftest import Rlctl
from tests.keys.tiny_models import logits, save

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
Q = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


def adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def on_q(layers: int, inputs: int = 32, outputs: int = 32, prefix: str = "") -> dict[str, torch.Tensor]:
    tensors = {}
    for layer in range(layers):
        tensors[prefix + Q.format(layer, "A")] = torch.ones(2, inputs)
        tensors[prefix + Q.format(layer, "B")] = torch.ones(outputs, 2)
    return tensors


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "qwen2"
    save("qwen2", folder, tie_word_embeddings=False)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_a_compiled_adapter_fails_the_check_and_is_cleaned(rlctl: Rlctl, tmp_path: Path) -> None:
    raw = adapter(tmp_path / "raw", on_q(1, 16, 16, prefix="_orig_mod."))
    assert "0 of 2 keys match" in rlctl("--inspect", raw, code=4).stderr
    done = rlctl(raw, tmp_path / "clean", "--to", "peft", "--verify", "--json").document
    assert "2 keys stripped of wrapper segments" in done["notes"]
    assert (done["counts"]["renamed"], done["source_scheme"]) == (2, "peft")
    assert load_file(tmp_path / "clean" / "adapter_model.safetensors").keys() == on_q(1, 16, 16).keys()
    seen = rlctl("--inspect", tmp_path / "clean", "--json").document["adapter"]
    assert [module["scaling"] for module in seen["modules"]] == [4.0]


@pytest.mark.parametrize(
    ("key", "hits"),
    [
        ("q_proj", range(12)),
        ("layers.1.self_attn.q_proj", [1]),
        ("^q_proj", []),
        ("base_model.model.model.layers.1.self_attn.q_proj", []),
    ],
)
def test_a_pattern_without_effect_is_a_warning_and_an_error_if_strict(
    rlctl: Rlctl, tmp_path: Path, key: str, hits: list[int]
) -> None:
    folder = adapter(tmp_path / "raw", on_q(12, 8, 8), r=2, lora_alpha=4, alpha_pattern={key: 50})
    scalings = [m["scaling"] for m in rlctl("--inspect", folder, "--json").document["adapter"]["modules"]]
    assert scalings == [25.0 if layer in hits else 2.0 for layer in range(12)]
    done = rlctl(folder, tmp_path / "out", "--to", "peft")
    assert ("matches no module of the adapter" in done.stderr) == (not hits)
    failed = rlctl(folder, tmp_path / "strict", "--to", "peft", "--strict", code=0 if hits else 4)
    assert (tmp_path / "strict").exists() == bool(hits), failed.stderr


def test_a_merge_on_the_way_is_the_merge_of_peft(rlctl: Rlctl, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    tensors = {name: 0.1 * torch.randn_like(tensor) for name, tensor in on_q(2).items()}
    lora = adapter(tmp_path / "lora", tensors, use_rslora=True)
    merged = rlctl(base, tmp_path / "mg", "--to", "megatron", "--tp", "2", "--adapter", lora, "--merge", "--json")
    assert merged.document["counts"]["merged"] == 2
    rlctl(tmp_path / "mg", tmp_path / "hf", "--to", "hf")
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    right = logits(tuned)
    assert (logits(ours) - right).abs().max() <= 1e-5
    assert (logits(plain) - right).abs().max() > 1e-2
    # The same with the adapter as the source and the base beside it.
    rlctl(lora, tmp_path / "too", "--to", "hf", "--base", base, "--merge", "--verify")
    assert all(torch.equal(t, tensors_of(tmp_path / "hf")[n]) for n, t in tensors_of(tmp_path / "too").items())


def test_merges_that_would_change_nothing_end_in_errors(rlctl: Rlctl, base: Path, tmp_path: Path) -> None:
    idle = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in on_q(2).items()}
    folder = adapter(tmp_path / "idle", idle)
    failed = rlctl(base, tmp_path / "out", "--to", "hf", "--adapter", folder, "--merge", code=4)
    assert "nothing merged" in failed.stderr
    assert "would load and do nothing" in rlctl("--inspect", folder, code=4).stderr
    zero = adapter(tmp_path / "zero", on_q(2), lora_alpha=0)
    failed = rlctl(base, tmp_path / "out", "--to", "hf", "--adapter", zero, "--merge", code=2)
    assert "lora_alpha is 0" in failed.stderr
    other = adapter(tmp_path / "other", on_q(3))
    failed = rlctl(base, tmp_path / "out", "--to", "hf", "--adapter", other, "--merge", code=4)
    assert "layers.2.self_attn.q_proj" in failed.stderr
    assert "add --merge" in rlctl(base, tmp_path / "out", "--to", "hf", "--adapter", other, code=2).stderr
    assert not (tmp_path / "out").exists()


def test_the_trained_head_of_a_model_inside_peft(rlctl: Rlctl, base: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "config.json").write_text((base / "config.json").read_text())
    (inside / "adapter_config.json").write_text(json.dumps(CONFIG | {"modules_to_save": ["lm_head"]}))
    tensors = {f"base_model.model.{name}": tensor for name, tensor in tensors_of(base).items()}
    for layer in (0, 1):
        for leaf in ("weight", "bias"):
            at = f"base_model.model.model.layers.{layer}.self_attn.q_proj."
            tensors[f"{at}base_layer.{leaf}"] = tensors.pop(f"{at}{leaf}")
    tensors |= {name.replace(".weight", ".default.weight"): tensor for name, tensor in on_q(2).items()}
    head = "base_model.model.lm_head."
    shape = tensors.pop(f"{head}weight").shape
    tensors[f"{head}original_module.weight"] = torch.zeros(shape)
    tensors[f"{head}modules_to_save.default.weight"] = torch.ones(shape)
    tensors[f"{head}modules_to_save.ref.weight"] = torch.full(shape, 2.0)
    save_file(tensors, inside / "model.safetensors", metadata={"format": "pt"})

    assert "--merge to fold the adapter in, or --to peft" in rlctl(inside, tmp_path / "no", "--to", "hf", code=2).stderr
    merged = rlctl(inside, tmp_path / "hf", "--to", "hf", "--merge", "--json").document
    assert merged["counts"]["unknown"] == 0
    made = tensors_of(tmp_path / "hf")
    assert made.keys() == tensors_of(base).keys()
    assert made["lm_head.weight"].unique().tolist() == [1.0]
    done = rlctl(inside, tmp_path / "peft", "--to", "peft", "--json").document
    assert done["source_scheme"] == "peft-in-model"
    exported = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert exported[f"{head}weight"].unique().tolist() == [1.0]
    reasons = {one["name"]: one["reason"] for one in done["dropped"]}
    assert "belongs to adapter 'ref'" in reasons[f"{head}modules_to_save.ref.weight"]
    assert "lm_head.weight" in reasons  # the frozen original, under its plain name
    assert "modules_to_save" in rlctl(inside, tmp_path / "v", "--to", "vllm-lora", code=4).stderr
    assert not (tmp_path / "v").exists()
