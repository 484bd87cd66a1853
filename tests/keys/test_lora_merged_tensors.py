"""Merging on the way of a conversion: regions against whole merges, and Megatron ranks out of base and adapter."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlctl.errors import CheckError
from rlctl.keys.boxes import Span
from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.compose import compose
from rlctl.keys.convert import Conversion, prepare, target_layout, write
from rlctl.keys.execute import execute
from rlctl.keys.layout import Ref
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.merge import merge_stream
from rlctl.keys.lora.merge_folder import merge_folder
from rlctl.keys.lora.merge_plan import plan_merge
from rlctl.keys.lora.merged_tensors import MergedTensors
from rlctl.keys.opened import open_model
from rlctl.keys.sinks import SafetensorsSink, shard_layout
from rlctl.keys.stored_tensors import StoredTensors

MOE = {
    "model_type": "qwen3_moe", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 12, "vocab_size": 16, "num_experts": 5,
    "moe_intermediate_size": 6, "mlp_only_layers": [0], "tie_word_embeddings": False,
    "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip
EXPERTS = "base_model.model.model.layers.1.mlp.experts"


def make(folder: Path, seed: int, *, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
    """Write a base with experts apart and an adapter on attention (DoRA), the dense layer and stacked experts."""
    from rlctl.keys.model_spec import ModelSpec
    from rlctl.keys.shapes import tensor_shapes

    torch.manual_seed(seed)
    base, adapter = folder / "base", folder / "adapter"
    base.mkdir()
    adapter.mkdir()
    spec = ModelSpec.from_config(MOE)
    save_file({n: torch.randn(s).to(dtype) for n, s in tensor_shapes(spec).items()}, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps(MOE))
    tensors: dict[str, torch.Tensor] = {}
    for path, (out, inputs) in {
        "model.layers.0.self_attn.q_proj": (16, 8), "model.layers.1.self_attn.k_proj": (8, 8),
        "model.layers.0.mlp.up_proj": (12, 8), "model.layers.0.mlp.down_proj": (8, 12), "lm_head": (16, 8),
    }.items():  # fmt: skip
        at = f"base_model.model.{path}"
        tensors |= {f"{at}.lora_A.weight": torch.randn(2, inputs), f"{at}.lora_B.weight": torch.randn(out, 2)}
    for wrapper, (out, inputs) in {".base_layer": (12, 8), "": (8, 6)}.items():
        tensors[f"{EXPERTS}{wrapper}.lora_A.weight"] = torch.randn(10, inputs)
        tensors[f"{EXPERTS}{wrapper}.lora_B.weight"] = torch.randn(out, 10)
    config = {"r": 2, "lora_alpha": 3, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return base, adapter


def opened(base: Path, adapter: Path) -> tuple[Any, Adapter, MergedTensors]:
    model = open_model(base)
    one = Adapter.open(adapter)
    shapes = {ref.name: info.shape for ref, info in model.tensors.infos.items()}
    plan = plan_merge(one.contents, one.config, shapes, moe=model.spec.moe, tied=model.spec.tied)
    return model, one, MergedTensors(model.tensors, one, plan)


def test_a_conversion_merges_on_the_way_and_equals_merging_first(tmp_path: Path) -> None:
    base, adapter = make(tmp_path, 1)
    merge_folder(base, adapter, tmp_path / "merged", durable=False)
    conversion = Conversion(base, "hf-fused")
    model, _, tensors = opened(base, adapter)
    plan = compose(model.layout, target_layout(conversion, model), tensors.infos)
    (tmp_path / "direct").mkdir()
    with tensors:
        sink = SafetensorsSink(tmp_path / "direct", shard_layout(plan, tensors, None))
        execute(plan, tensors, sink)
        sink.close()
        tensors.check_changed()
    write(prepare(Conversion(tmp_path / "merged", "hf-fused")), tmp_path / "after")
    with Checkpoint.open(tmp_path / "direct") as direct, Checkpoint.open(tmp_path / "after") as after:
        assert direct.entries.keys() == after.entries.keys()
        for name in direct.entries:
            assert torch.equal(direct.tensor(name), after.tensor(name)), name


def stored(tensors: dict[str, torch.Tensor], folder: Path) -> StoredTensors:
    save_file(tensors, folder / "x.safetensors")
    return StoredTensors.of({Ref(n): e for n, e in Checkpoint.open(folder / "x.safetensors").entries.items()})


@pytest.mark.parametrize("kind", ["linear", "dora", "embedding", "dora embedding", "experts", "bias", "replaced"])
def test_regions_are_cut_out_of_the_whole_merge(kind: str, tmp_path: Path) -> None:
    seed = 31
    torch.manual_seed(seed)
    rng = random.Random(seed)
    at, fields = "base_model.model.q", {"r": 2, "lora_alpha": 3}
    base = {"q.weight": torch.randn(9, 7), "q.bias": torch.randn(9)}
    parts = {f"{at}.lora_A.weight": torch.randn(2, 7), f"{at}.lora_B.weight": torch.randn(9, 2)}
    if kind == "dora":
        parts[f"{at}.lora_magnitude_vector"] = torch.rand(9) + 0.5
    elif "embedding" in kind:
        parts = {f"{at}.lora_embedding_A": torch.randn(2, 9), f"{at}.lora_embedding_B": torch.randn(7, 2)}
        if "dora" in kind:
            parts[f"{at}.lora_magnitude_vector"] = torch.rand(7) + 0.5
    elif kind == "experts":
        base = {"m.experts.down_proj": torch.randn(5, 4, 6)}
        parts = {"base_model.model.m.experts.lora_A.weight": torch.randn(10, 6)}
        parts["base_model.model.m.experts.lora_B.weight"] = torch.randn(4, 10)
        fields["target_parameters"] = ["experts.down_proj"]  # type: ignore[assignment]
    elif kind == "bias":
        parts[f"{at}.lora_B.bias"] = torch.randn(9)
    elif kind == "replaced":
        parts |= {"base_model.model.q.modules_to_save.default.weight": torch.randn(9, 7)}
        parts = {n.replace(".weight", ".default.weight") if "lora_" in n else n: t for n, t in parts.items()}
    config = AdapterConfig.parse({**fields, "use_dora": "dora" in kind})
    one = Adapter.from_tensors(parts, config)
    moe = None
    if kind == "experts":
        from rlctl.keys.families import FAMILIES

        moe = FAMILIES["qwen3_moe"].experts
    plan = plan_merge(one.contents, config, {n: tuple(t.shape) for n, t in base.items()}, moe=moe)
    whole = dict(merge_stream(base.items(), one, plan))
    tensors = MergedTensors(stored(base, tmp_path), one, plan)
    for name, right in whole.items():
        assert (tensors.entry(Ref(name)) is None) == plan.touches(name)
        for _ in range(40):
            box = []
            for size in right.shape:
                step = rng.choice([1, 1, 2])
                start = rng.randrange(size)
                box.append(Span(start, rng.randint(1, (size - start - 1) // step + 1), step))
            got = tensors.read(Ref(name), tuple(box))
            torch.testing.assert_close(
                got, right[tuple(s.slice for s in box)], atol=1e-5, rtol=1e-5, msg=f"{name} {box}"
            )
    tensors.check_changed()


def test_reading_nothing_that_differs_is_an_error(tmp_path: Path) -> None:
    parts = {
        "base_model.model.q.lora_A.weight": torch.ones(2, 4),
        "base_model.model.q.lora_B.weight": torch.zeros(3, 2),
    }
    one = Adapter.from_tensors(parts, AdapterConfig.parse({"r": 2, "lora_alpha": 3}))
    base = {"q.weight": torch.randn(3, 4)}
    tensors = MergedTensors(stored(base, tmp_path), one, plan_merge(one.contents, one.config, {"q.weight": (3, 4)}))
    assert torch.equal(tensors.read(Ref("q.weight"), (Span(0, 3), Span(0, 4))), base["q.weight"])
    with pytest.raises(CheckError, match="nothing merged"):
        tensors.check_changed()
