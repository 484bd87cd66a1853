"""Shapes by arithmetic against transformers' own models, and preset totals against the published counts."""

import random
import subprocess
import sys
import time
from typing import Any

import pytest

from rlctl.errors import FindingsError, UsageError
from rlctl.keys.families import FAMILIES
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.presets import preset, preset_config, preset_names
from rlctl.keys.shapes import (
    active_parameter_count,
    fused_tensor_shapes,
    layer_shapes,
    parameter_count,
    tensor_shapes,
    weight_bytes,
)

# Known totals: transformers' num_parameters() or the count the model's hub page shows (tied heads counted once).
TOTALS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2-1.5b": 1_543_714_304,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
}


def random_config(family: str, rng: random.Random) -> dict[str, Any]:
    kv = rng.choice([1, 2, 3])
    heads = kv * rng.choice([1, 2, 4])
    layers = rng.choice([1, 2, 5])
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * 2 * rng.randint(2, 8),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": rng.randint(3, 40),
        "vocab_size": rng.randint(10, 70),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if rng.random() < 0.7 or family == "gpt_oss":
        config["head_dim"] = 2 * rng.randint(1, 9)
    if family in ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"):
        config["attention_bias"] = rng.random() < 0.5
    if family == "llama":
        config["mlp_bias"] = rng.random() < 0.5
    experts = rng.randint(2, 12)
    if family in ("qwen2_moe", "qwen3_moe"):
        config |= {
            "num_experts": experts,
            "moe_intermediate_size": rng.randint(2, 9),
            "decoder_sparse_step": rng.choice([1, 1, 2]),
            "mlp_only_layers": sorted(rng.sample(range(layers), rng.randint(0, layers - 1))),
        }
    if family == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": rng.randint(2, 9), "qkv_bias": rng.random() < 0.5}
    if family in ("mixtral", "gpt_oss"):
        config["num_local_experts"] = experts
    if family in ("qwen2_5_vl", "qwen3_vl"):
        return vision_config(config, rng)
    if family == "deepseek_v3":
        del config["tie_word_embeddings"]
        config |= {
            "num_key_value_heads": heads,
            "n_routed_experts": experts,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": rng.randint(2, 9),
            "n_shared_experts": rng.choice([1, 2]),
            "first_k_dense_replace": rng.randint(0, layers),
            "q_lora_rank": rng.choice([None, 6]),
            "kv_lora_rank": rng.randint(2, 9),
            "qk_nope_head_dim": rng.randint(2, 9),
            "qk_rope_head_dim": 2 * rng.randint(1, 4),
            "v_head_dim": rng.randint(2, 9),
        }
    return config


def vision_config(text: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Put a language model's values where a vision-language model has them, and add a small tower."""
    family, tied = text.pop("model_type"), text.pop("tie_word_embeddings")
    tower: dict[str, Any] = {
        "depth": rng.randint(1, 3),
        "hidden_size": 8 * rng.randint(1, 3),
        "intermediate_size": rng.randint(3, 9),
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": rng.randint(2, 5),
        "temporal_patch_size": rng.choice([1, 2]),
        "spatial_merge_size": rng.choice([1, 2]),
        "in_channels": rng.choice([1, 3]),
    }
    if family == "qwen3_vl":
        tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": rng.choice([[], [0], [0, 0]])}
    elif "head_dim" in text:
        del text["head_dim"]  # Qwen2.5-VL has none
    return {"model_type": family, "text_config": text, "vision_config": tower, "tie_word_embeddings": tied}


def transformers_model(config: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    values = {k: v for k, v in config.items() if k not in ("model_type", "torch_dtype")}
    model_type = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(AutoConfig.for_model(model_type, **values))


def in_memory(model: Any) -> dict[str, tuple[int, ...]]:
    """Parameters and saved buffers, a tied head once."""
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    state = model.state_dict()
    return shapes | {n: tuple(b.shape) for n, b in model.named_buffers() if n in state}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_equal_transformers(family: str, seed: int, tmp_path: Any) -> None:
    from safetensors import safe_open

    config = random_config(family, random.Random(f"{family}-{seed}"))
    spec = ModelSpec.from_config(config)
    model = transformers_model(config)
    assert fused_tensor_shapes(spec) == in_memory(model)
    model.to_empty(device="cpu").tie_weights()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        on_disk = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    assert tensor_shapes(spec) == on_disk
    # The configuration that transformers writes back (other keys, filled defaults) means the same weights.
    assert tensor_shapes(ModelSpec.from_folder(tmp_path)) == on_disk


@pytest.mark.parametrize("name", preset_names())
def test_preset_at_full_width_equals_transformers(name: str) -> None:
    config = preset_config(name) | {"num_hidden_layers": 4}
    assert fused_tensor_shapes(ModelSpec.from_config(config)) == in_memory(transformers_model(config))


def test_totals_of_published_vision_language_models() -> None:
    # The older, flat form of the configuration, with the values of Qwen2.5-VL-7B-Instruct.
    tower = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    seven = {
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 152064,
        "vision_config": tower,
    }  # fmt: skip
    assert parameter_count(ModelSpec.from_config(seven)) == 8_292_166_656
    with pytest.raises(FindingsError, match="vision_config is missing"):
        ModelSpec.from_config({k: v for k, v in seven.items() if k != "vision_config"})


@pytest.mark.parametrize("name", preset_names())
def test_preset_totals(name: str) -> None:
    assert parameter_count(preset(name)) == TOTALS[name]


def test_active_parameters_and_bytes() -> None:
    assert active_parameter_count(preset("qwen3-235b-a22b")) == 22_190_763_520  # the "A22B" of its name
    assert active_parameter_count(preset("qwen3-8b")) == TOTALS["qwen3-8b"]
    assert weight_bytes(preset("qwen2.5-0.5b")) == 988_065_536  # the published file holds this many data bytes
    assert weight_bytes(preset("qwen2.5-0.5b"), "F32") == 2 * 988_065_536
    deepseek = preset("deepseek-v3")
    assert weight_bytes(deepseek) == 2 * TOTALS["deepseek-v3"] + 2 * 58 * 256  # 58 routers keep a float32 correction


def test_mtp_layer_of_deepseek_v3() -> None:
    spec = preset("deepseek-v3")
    extra = tensor_shapes(spec, mtp=True).keys() - tensor_shapes(spec).keys()
    assert all(name.startswith("model.layers.61.") for name in extra)
    assert {"model.layers.61.eh_proj.weight", "model.layers.61.shared_head.norm.weight"} <= extra
    assert "model.layers.61.mlp.experts.255.down_proj.weight" in extra


def test_one_trillion_parameters_are_named_within_a_second() -> None:
    start = time.process_time()
    shapes = tensor_shapes(preset("kimi-k2"))
    assert time.process_time() - start < 1
    assert sum(".experts." in name for name in shapes) == 60 * 384 * 3


def test_layer_shapes_are_relative() -> None:
    spec = preset("qwen2.5-0.5b")
    assert layer_shapes(spec, 3)["self_attn.q_proj.bias"] == (896,)


def test_unknown_model_type_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown model_type 'qwen9'") as caught:
        ModelSpec.from_config({"model_type": "qwen9"})
    assert "qwen3_moe" in str(caught.value)
    with pytest.raises(UsageError, match="no model_type"):
        ModelSpec.from_config({})
    with pytest.raises(UsageError, match="did you mean 'kimi-k2'"):
        preset("kimi-k3")


def test_every_fault_of_a_configuration_at_once() -> None:
    config = preset_config("qwen3-235b-a22b") | {
        "hidden_size": "wide",
        "num_hidden_layers": 10**9,
        "num_attention_heads": True,
        "tie_word_embeddings": "yes",
        "mlp_only_layers": [-1],
        "torch_dtype": "bfloat61",
    }
    del config["vocab_size"]
    with pytest.raises(FindingsError) as caught:
        ModelSpec.from_config(config)
    text = str(caught.value)
    for word in ("hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word", "mlp_only", "vocab_size"):
        assert word in text
    assert "did you mean 'bfloat16'" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 14, "num_key_value_heads": 4}, "not a multiple of num_key_value_heads"),
        ({"hidden_size": 897}, "there is no head_dim"),
        ({"model_type": 7}, "model_type must be a string"),
    ],
)
def test_inconsistent_configuration(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FindingsError, match="1 fault") as caught:
        ModelSpec.from_config(preset_config("qwen2.5-0.5b") | change)
    assert message in str(caught.value)


def test_planning_loads_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, rlctl.keys.shapes as s, rlctl.keys.presets as p; s.tensor_shapes(p.preset('qwen3-8b'));"
        "print([m for m in ('torch', 'numpy', 'transformers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
