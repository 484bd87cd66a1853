"""Adapters on their own: what PEFT's and vLLM's files look like, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlctl.errors import CheckError, UsageError
from rlctl.keys.families import FAMILIES
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.experts import stack, unstack
from rlctl.keys.lora.export import AdapterTarget, export_adapter
from rlctl.keys.lora.merge import merge_stream
from rlctl.keys.lora.merge_plan import plan_merge
from rlctl.keys.lora.rewrite import fitted
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import PlanError
from tests.keys.exported_adapters import LAYER, Q, adapter

HEAD: dict[str, Tensor] = {
    "base_model.model.lm_head.original_module.weight": torch.zeros(32, 16),
    "base_model.model.lm_head.modules_to_save.default.weight": torch.full((32, 16), 1.0),
    "base_model.model.lm_head.modules_to_save.ref.weight": torch.full((32, 16), 2.0),
}


QWEN2 = ModelSpec.from_config({
    "model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 32,
})  # fmt: skip


def refused(one: Adapter, target: AdapterTarget, folder: Path, **options: Any) -> str:
    with pytest.raises(PlanError) as error:
        export_adapter(one, folder / "out", target, **options)
    assert not list(folder.iterdir())
    return str(error.value)


def test_the_trained_head_is_shipped_and_the_rest_reported(tmp_path: Path) -> None:
    one = adapter(HEAD, modules_to_save=["lm_head"])
    report = export_adapter(one, tmp_path / "out", "peft-file", durable=False)
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert list(written) == ["base_model.model.lm_head.weight"]
    assert torch.equal(written["base_model.model.lm_head.weight"], torch.ones(32, 16))
    reasons = dict(report.dropped)
    assert "frozen original" in reasons["base_model.model.lm_head.original_module.weight"]
    assert "'ref'" in reasons["base_model.model.lm_head.modules_to_save.ref.weight"]


def test_a_trained_head_is_refused_for_vllm_and_a_classifier_is_not(tmp_path: Path) -> None:
    text = refused(adapter(HEAD, modules_to_save=["lm_head"]), "vllm-lora", tmp_path)
    assert "modules_to_save other than classifier and score: lm_head.weight" in text
    score = LAYER | {"base_model.model.score.weight": torch.ones(2, 16)}
    export_adapter(adapter(score, modules_to_save=["score"]), tmp_path / "out", "vllm-lora", durable=False)
    assert "base_model.model.score.weight" in load_file(tmp_path / "out" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bias": "all"}, "bias='all'"), ({"lora_bias": True}, "lora_bias=True"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens=(1, 2)"),
        ({"layer_replication": [[0, 1]]}, "layer_replication=([0, 1],)"), ({"use_qalora": True}, "use_qalora=True"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"), ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "olora"), ({"init_lora_weights": "new"}, "new"),
    ],
)  # fmt: skip
def test_what_vllm_does_not_load_is_refused_by_name(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    assert named in refused(adapter(LAYER, **fields), "vllm-lora", tmp_path)


def test_dora_is_refused_for_vllm_and_kept_for_peft(tmp_path: Path) -> None:
    tensors = LAYER | {f"{Q}.lora_magnitude_vector": torch.ones(16)}
    one = adapter(tensors, use_dora=True)
    assert "use_dora=True" in refused(one, "vllm-lora", tmp_path)
    export_adapter(one, tmp_path / "out", "peft-file", durable=False)
    assert f"{Q}.lora_magnitude_vector" in load_file(tmp_path / "out" / "adapter_model.safetensors")


@pytest.mark.parametrize("init", ["gaussian", "eva", "orthogonal", "mica", True, False])
def test_initialisations_that_leave_the_base_alone_pass(init: bool | str, tmp_path: Path) -> None:
    export_adapter(adapter(LAYER, init_lora_weights=init), tmp_path / "out", "vllm-lora", durable=False)


def test_a_moved_base_is_refused_unless_it_is_the_one_served(tmp_path: Path) -> None:
    one = adapter(LAYER, init_lora_weights="pissa")
    assert "changed the base weights" in refused(one, "peft-file", tmp_path)
    export_adapter(one, tmp_path / "out", "vllm-lora", base_is_moved=True, durable=False)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["init_lora_weights"] is True


def test_all_refusals_come_at_once(tmp_path: Path) -> None:
    text = refused(adapter(LAYER | HEAD, bias="all", init_lora_weights="pissa"), "vllm-lora", tmp_path)
    assert all(part in text for part in ("pissa", "bias='all'", "lm_head.weight"))


def test_embeddings_are_refused_where_vllm_does_not_adapt_them(tmp_path: Path) -> None:
    at = "base_model.model.model.embed_tokens"
    one = adapter({f"{at}.lora_embedding_A": torch.ones(2, 32), f"{at}.lora_embedding_B": torch.ones(16, 2)})
    assert "no LoRA on model.embed_tokens of qwen2" in refused(one, "vllm-lora", tmp_path, spec=QWEN2)
    export_adapter(one, tmp_path / "out", "vllm-lora", durable=False)


def test_stacked_experts_need_the_model_for_vllm(tmp_path: Path) -> None:
    at = "base_model.model.model.layers.0.mlp.experts"
    one = adapter({f"{at}.lora_A.weight": torch.ones(6, 4), f"{at}.lora_B.weight": torch.ones(4, 6)},
                  target_parameters=["experts.down_proj"])  # fmt: skip
    assert "config.json" in refused(one, "vllm-lora", tmp_path)


def test_rewritten_targets_and_patterns_say_the_same_of_other_layers() -> None:
    config = AdapterConfig.parse(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "gone"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        }
    )  # fmt: skip
    tensors = {}
    for layer, r in ((0, 4), (1, 2), (11, 4)):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {f"{at}.lora_A.weight": torch.ones(r, 8), f"{at}.lora_B.weight": torch.ones(8, r)}
    modules = Adapter.from_tensors(tensors, config).contents.modules
    kept = fitted(config, modules)
    assert kept.target_modules == ("q_proj",)
    assert kept.rank_pattern == config.rank_pattern
    odd = fitted(AdapterConfig.parse({"r": 64, "lora_alpha": 1}), modules)
    assert [odd.scaling(m.site) for m in modules] == [m.scaling for m in modules]
    assert odd.target_modules == ("q_proj",)


def expert_pairs(
    experts: list[int], parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Tensor]:
    tensors = {}
    for e in experts:
        for part in parts:
            at = f"base_model.model.model.layers.0.mlp.experts.{e}.{part}"
            out, inputs = (4, 6) if part == "down_proj" else (6, 4)
            tensors |= {f"{at}.lora_A.weight": torch.ones(2, inputs), f"{at}.lora_B.weight": torch.ones(out, 2)}
    return tensors


def test_experts_that_do_not_make_a_stack_are_named() -> None:
    moe = FAMILIES["qwen3_moe"].experts
    assert moe is not None
    with pytest.raises(PlanError, match=r"experts \[1\] of 3 have no adapter"):
        stack(adapter(expert_pairs([0, 2])), moe, 3)
    with pytest.raises(PlanError, match="ranks, alphas or shapes differ"):
        stack(adapter(expert_pairs([0, 1, 2]), alpha_pattern={r"experts\.1\.up_proj": 3}), moe, 3)
    plain = adapter(LAYER)
    assert stack(plain, moe, 3) is plain
    assert unstack(plain, moe) is plain
    only_gate = stack(adapter(expert_pairs([0, 1, 2], ("gate_proj",))), moe, 3)
    (module,) = only_gate.contents.modules
    assert (module.parameter, module.scaling.r, module.depth) == ("gate_up_proj", 2, 0)
    assert not only_gate.delta(module)[:, 6:].any()
    gpt = FAMILIES["gpt_oss"].experts
    assert gpt is not None
    with pytest.raises(UsageError, match="stacked only"):
        unstack(only_gate, gpt)


def test_a_resized_embedding_needs_a_resized_base() -> None:
    tensors = LAYER | {"base_model.model.model.embed_tokens.weight": torch.ones(40, 16)}
    one = adapter(tensors, modules_to_save=["embed_tokens"])
    base = {"model.layers.0.self_attn.q_proj.weight": (16, 16), "model.embed_tokens.weight": (32, 16)}
    with pytest.raises(PlanError, match=r"own model\.embed_tokens\.weight is \(40, 16\).*Resize the base"):
        plan_merge(one.contents, one.config, base, tied=False)


@pytest.mark.parametrize("key", ["use_qalora", "alora_invocation_tokens", "layer_replication"])
def test_what_is_not_an_addition_cannot_be_merged(key: str) -> None:
    value: Any = {"use_qalora": True, "alora_invocation_tokens": [1], "layer_replication": [[0, 1]]}[key]
    one = adapter(LAYER, **{key: value})
    with pytest.raises(UsageError, match=key):
        plan_merge(one.contents, one.config, {"model.layers.0.self_attn.q_proj.weight": (16, 16)})


def test_a_base_tensor_that_never_comes_is_noticed() -> None:
    one = adapter(LAYER)
    plan = plan_merge(one.contents, one.config, {"model.layers.0.self_attn.q_proj.weight": (16, 16)})
    with pytest.raises(CheckError, match=r"1 base tensors to merge into never came, model\.layers\.0"):
        list(merge_stream([("model.norm.weight", torch.ones(16))], one, plan))
