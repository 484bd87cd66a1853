"""PEFT as the judge: our deltas and merges against its own, and our adapter files loaded by it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)  # fmt: skip

from rlctl.keys.convert import Conversion, prepare
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import check_file_names
from rlctl.keys.lora.experts import stack, unstack
from rlctl.keys.lora.export import export_adapter
from rlctl.keys.lora.merge import merge_stream
from rlctl.keys.lora.merge_plan import plan_merge
from rlctl.keys.model_spec import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def qwen3_moe() -> Any:
    sizes = SIZES | {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2))


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "all linear": (llama, {"target_modules": "all-linear"}),
    "rslora with patterns": (
        qwen2,
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True, "modules_to_save": ["lm_head"],
         "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 6}, "alpha_pattern": {"v_proj": 3}},
    ),
    "dora": (llama, {"target_modules": ["q_proj", "o_proj", "up_proj"], "use_dora": True}),
    "embedding and head": (llama, {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    "dora on an embedding": (llama, {"target_modules": ["embed_tokens", "k_proj"], "use_dora": True}),
    "trained biases": (qwen2, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "all biases": (qwen2, {"target_modules": ["q_proj"], "bias": "all"}),
    "lora biases": (qwen2, {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "one layer of two": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "both expert tensors": (
        qwen3_moe,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
         "rank_pattern": {"experts.down_proj": 3}},
    ),
    "gate_up only": (qwen3_moe, {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    "down and router": (mixtral, {"target_modules": [], "target_parameters": ["gate.weight", "experts.down_proj"]}),
}  # fmt: skip


def trained(make: Callable[[], Any], fields: dict[str, Any], seed: int) -> Any:
    """Return a model with a random adapter, its biases and magnitudes moved too."""
    torch.manual_seed(seed)
    model = make().float().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **fields)).eval()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "magnitude" in name or "modules_to_save" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "lora_" in name or (name.endswith(".bias") and parameter.requires_grad):
                parameter.normal_(std=0.2)
    return tuned


def spec_of(model: Any) -> ModelSpec:
    return ModelSpec.from_config(model.config.to_dict())


def save(model: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(24).reshape(2, 12) * 7 % 48


@pytest.mark.parametrize("name", CASES)
def test_merge_equals_peft(name: str, tmp_path: Path) -> None:
    make, fields = CASES[name]
    seed = 100 + list(CASES).index(name)
    tuned = trained(make, fields, seed)
    spec = spec_of(tuned)
    save(tuned, tmp_path / "adapter")
    live_state = {n: t.clone() for n, t in tuned.state_dict().items()}
    with tuned.disable_adapter():
        base = {n: t.clone() for n, t in make_base(make, seed).items()}
    filed = Adapter.open(tmp_path / "adapter")
    live = Adapter.from_tensors(live_state, AdapterConfig.parse(tmp_path / "adapter"))
    assert {m.site: m.scaling for m in filed.contents.modules} == {m.site: m.scaling for m in live.contents.modules}
    got = run(filed, base, spec)
    got_live = run(live, live_state, spec)
    right = tuned.merge_and_unload().state_dict()
    assert got.keys() == right.keys() == got_live.keys()
    for key, value in right.items():
        torch.testing.assert_close(got[key], value, atol=1e-6, rtol=0, msg=f"{key} (seed {seed})")
        torch.testing.assert_close(got_live[key], value, atol=1e-6, rtol=0, msg=f"live {key} (seed {seed})")


def make_base(make: Callable[[], Any], seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return make().float().state_dict()


def run(adapter: Adapter, base: dict[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    shapes = {n: tuple(t.shape) for n, t in base.items()}
    plan = plan_merge(adapter.contents, adapter.config, shapes, moe=spec.moe, tied=spec.tied)
    return dict(merge_stream(base.items(), adapter, plan))


@pytest.mark.parametrize("name", ["all linear", "rslora with patterns", "dora", "both expert tensors"])
def test_deltas_equal_peft(name: str, tmp_path: Path) -> None:
    make, fields = CASES[name]
    tuned = trained(make, fields, 7)
    save(tuned, tmp_path)
    adapter = Adapter.open(tmp_path)
    layers = {n: m for n, m in tuned.named_modules() if hasattr(m, "lora_A") and len(m.lora_A)}
    assert len(layers) == len(adapter.contents.modules)
    for module in adapter.contents.modules:
        layer = layers["base_model.model." + module.path + ".base_layer" * module.depth]
        right = layer.get_delta_weight("default")
        assert layer.scaling["default"] == pytest.approx(module.scaling.value, abs=1e-12)
        torch.testing.assert_close(adapter.delta(module), right, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_exported_adapter_loads_in_peft_and_gives_equal_logits(name: str, tmp_path: Path, ids: torch.Tensor) -> None:
    make, fields = CASES[name]
    tuned = trained(make, fields, 11)
    save(tuned, tmp_path / "saved")
    state = {f"_orig_mod.{n}": t for n, t in tuned.state_dict().items()}
    live = Adapter.from_tensors(state, AdapterConfig.parse(tmp_path / "saved"))
    report = export_adapter(live, tmp_path / "ours", "peft-file", durable=False)
    assert f"{len(state)} keys stripped" in report.notes
    with torch.no_grad():
        right = tuned(ids).logits
    names = Adapter.open(tmp_path / "ours")
    check_file_names([m.a for m in names.contents.modules] + [m.b for m in names.contents.modules])
    torch.manual_seed(11)
    logits = load_and_run(make().float().eval(), tmp_path / "ours", ids)
    torch.testing.assert_close(logits, right, atol=1e-5, rtol=0)


def load_and_run(model: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Load an adapter folder with PEFT, which must find every key, and return the logits."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = PeftModel.from_pretrained(model, folder).eval()
    missing = [str(w.message) for w in caught if "missing" in str(w.message)]
    assert not missing
    state = peft.utils.load_peft_weights(folder)
    expected = peft.get_peft_model_state_dict(loaded)
    assert {k for k in state if ".bias" not in k} <= set(expected)
    assert {k for k in expected if "lora_" in k} <= set(state)
    with torch.no_grad():
        return loaded(ids).logits


@pytest.mark.parametrize("name", ["both expert tensors", "gate_up only"])
def test_experts_apart_and_stacked_again_are_the_same_to_peft(name: str, tmp_path: Path, ids: torch.Tensor) -> None:
    make, fields = CASES[name]
    tuned = trained(make, fields, 13)
    save(tuned, tmp_path / "saved")
    spec = spec_of(tuned)
    assert spec.moe is not None
    stacked = Adapter.open(tmp_path / "saved")
    apart = unstack(stacked, spec.moe)
    again = stack(apart, spec.moe, spec.experts)
    by_site = {m.site: m for m in again.contents.modules}
    for module in stacked.contents.modules:
        assert by_site[module.site].scaling == module.scaling
        for tensor, right in zip(again.pair(by_site[module.site]), stacked.pair(module), strict=True):
            assert torch.equal(tensor, right)
    export_adapter(again, tmp_path / "again", "peft-file", durable=False)
    with torch.no_grad():
        right_logits = tuned(ids).logits
    torch.manual_seed(13)
    torch.testing.assert_close(
        load_and_run(make().float().eval(), tmp_path / "again", ids), right_logits, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_single_experts_stack_into_blocks_that_peft_runs(
    rslora: bool, tmp_path: Path, ids: torch.Tensor
) -> None:
    """A transformers-4 adapter: PEFT stacks such a file itself when loading, which gives us the logits to meet."""
    torch.manual_seed(17)
    tensors = {}
    for layer in range(2):
        for expert in range(6):
            for part, (inputs, outputs) in {"gate_proj": (32, 16), "up_proj": (32, 16), "down_proj": (16, 32)}.items():
                at = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{part}"
                tensors[f"{at}.lora_A.weight"] = torch.randn(4, inputs) * 0.3
                tensors[f"{at}.lora_B.weight"] = torch.randn(outputs, 4) * 0.3
    fields = {"r": 4, "lora_alpha": 6, "use_rslora": rslora, "task_type": "CAUSAL_LM",
              "target_modules": ["gate_proj", "up_proj", "down_proj"]}  # fmt: skip
    single = Adapter.from_tensors(tensors, AdapterConfig.parse(fields))
    model = qwen3_moe().float().eval()
    spec = spec_of(model)
    assert spec.moe is not None
    base = {n: t.clone() for n, t in model.state_dict().items()}
    merged = run(single, base, spec)
    blocks = stack(single, spec.moe, spec.experts)
    ranks = {m.parameter: m.scaling.r for m in blocks.contents.modules}
    assert ranks == {"gate_up_proj": 8, "down_proj": 4}
    assert all(m.scaling.value == single.config.scaling("x").value for m in blocks.contents.modules)
    export_adapter(blocks, tmp_path / "blocks", "peft-file", durable=False)
    reference = qwen3_moe().float().eval()
    reference.load_state_dict(merged)
    with torch.no_grad():
        right = reference(ids).logits
    torch.testing.assert_close(load_and_run(model, tmp_path / "blocks", ids), right, atol=1e-5, rtol=0)
    if not rslora:  # PEFT 0.21 doubles alpha for rsLoRA too, which changes the scaling
        export_adapter(single, tmp_path / "single", "peft-file", durable=False)
        fresh = qwen3_moe().float().eval()
        fresh.load_state_dict(base)
        loaded = PeftModel.from_pretrained(fresh, tmp_path / "single").eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, right, atol=1e-5, rtol=0)


def test_merged_folder_loads_and_equals_the_float32_merge_cast_once(tmp_path: Path, ids: torch.Tensor) -> None:
    make, fields = CASES["both expert tensors"]
    tuned = trained(make, fields, 19)
    save(tuned, tmp_path / "adapter")
    torch.manual_seed(19)
    model = make().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    adapter = Adapter.open(tmp_path / "adapter")
    report = prepare(Conversion(tmp_path / "base", "hf", adapter=tmp_path / "adapter", merge=True)).write(
        tmp_path / "merged", durable=False, verify=True
    )
    assert report["counts"]["merged"] == 2 * (6 * 3 + 1)
    exact = run(adapter, {n: t.float() for n, t in model.state_dict().items()}, spec_of(tuned))
    loaded, info = type(model).from_pretrained(tmp_path / "merged", dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == "qwen3_moe"


def test_untied_merge_writes_a_head_and_says_so(tmp_path: Path, ids: torch.Tensor) -> None:
    sizes = SIZES | {"tie_word_embeddings": True}
    tuned = trained(
        lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)),
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        23,
    )
    save(tuned, tmp_path / "adapter")
    torch.manual_seed(23)
    Qwen2ForCausalLM(Qwen2Config(**sizes)).float().save_pretrained(tmp_path / "base")
    conversion = Conversion(tmp_path / "base", "hf", adapter=tmp_path / "adapter", merge=True, untie=True)
    prepare(conversion).write(tmp_path / "merged", durable=False)
    loaded, info = Qwen2ForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, tuned(ids).logits, atol=1e-5, rtol=0)
