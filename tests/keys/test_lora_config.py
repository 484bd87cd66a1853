"""adapter_config.json: old files, wrong types, patterns, and the scaling of each module."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.errors import FindingsError, RlctlError, UsageError
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.patterns import key_matches, unmatched_targets

LAYERS = [f"model.layers.{i}.self_attn.q_proj" for i in range(12)]


@pytest.mark.parametrize(
    ("key", "hits"),
    [
        ("q_proj", set(range(12))),
        ("layers.1.self_attn.q_proj", {1}),
        ("^q_proj", set()),
        ("base_model.model.model.layers.1.self_attn.q_proj", set()),
    ],
)
def test_alpha_pattern_is_anchored_at_a_dot_and_the_end(key: str, hits: set[int]) -> None:
    config = AdapterConfig.parse({"r": 4, "lora_alpha": 8, "alpha_pattern": {key: 100}})
    assert {i for i, path in enumerate(LAYERS) if config.scaling(path).value == 25.0} == hits
    assert all(config.scaling(path).value in (25.0, 2.0) for path in LAYERS)
    idle = config.zero_hit_patterns(LAYERS)
    assert bool(idle) == (not hits)
    assert all(key in str(finding) and "alpha_pattern" in str(finding) for finding in idle)


def test_first_matching_pattern_wins_and_the_shadowed_one_is_reported() -> None:
    config = AdapterConfig.parse(
        {"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2, "layers.1.self_attn.q_proj": 16}}
    )
    assert {config.scaling(path).r for path in LAYERS} == {2}
    (finding,) = config.zero_hit_patterns(LAYERS)
    assert "shadowed" in finding.message


def test_rank_stabilised_scaling_uses_the_rank_of_the_module() -> None:
    config = AdapterConfig.parse(
        {"r": 16, "lora_alpha": 32, "use_rslora": True, "rank_pattern": {"layers.3.self_attn.q_proj": 4}}
    )
    assert config.scaling("model.layers.3.self_attn.q_proj").value == 16.0
    assert config.scaling("model.layers.13.self_attn.q_proj").value == 8.0


def test_file_of_an_old_peft_takes_defaults_and_names_what_it_ignores(tmp_path: Path) -> None:
    old = {
        "base_model_name_or_path": "some/model", "bias": "none", "enable_lora": None, "fan_in_fan_out": False,
        "inference_mode": True, "lora_alpha": 16, "lora_dropout": 0.05, "merge_weights": False,
        "modules_to_save": None, "peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(old))
    config = AdapterConfig.parse(tmp_path)
    assert (config.use_rslora, config.use_dora, config.rank_pattern) == (False, False, {})
    assert config.scaling("model.layers.0.self_attn.q_proj").value == 2.0
    notes = " ".join(config.notes)
    assert "enable_lora, merge_weights" in notes
    assert "use_rslora" in notes
    assert config.to_dict()["lora_dropout"] == 0.05
    assert "enable_lora" not in config.to_dict()


@pytest.mark.parametrize(
    ("key", "value", "expected", "found"),
    [
        ("r", "eight", "a whole number", "a string ('eight')"),
        ("r", True, "a whole number", "a boolean"),
        ("r", 0, "from 1", "an integer (0)"),
        ("lora_alpha", None, "a finite number", "null"),
        ("lora_alpha", 10**400, "a finite number", "an integer"),
        ("use_rslora", "yes", "true or false", "a string ('yes')"),
        ("rank_pattern", ["q_proj"], "a mapping", "a list"),
        ("rank_pattern", {"q_proj": 1.5}, "'q_proj'", "a number"),
        ("target_modules", {"q": 1}, "a list of strings", "an object"),
        ("modules_to_save", [1], "a list of strings", "a list"),
        ("bias", "some", "'none', 'all' or 'lora_only'", "a string ('some')"),
        ("layers_to_transform", ["0"], "a list of whole numbers", "a list"),
        ("init_lora_weights", 3, "name of an initialisation", "an integer (3)"),
    ],
)
def test_wrong_type_names_the_key_and_both_types(key: str, value: Any, expected: str, found: str) -> None:
    with pytest.raises(FindingsError) as error:
        AdapterConfig.parse({"r": 8, "lora_alpha": 16, key: value}, where="a.json")
    text = str(error.value)
    assert all(part in text for part in (key, expected, found, "a.json")), text


def test_every_wrong_key_is_reported_at_once() -> None:
    with pytest.raises(FindingsError) as error:
        AdapterConfig.parse({"r": "x", "lora_alpha": [], "use_dora": 1})
    assert len(error.value.findings) == 3


@pytest.mark.parametrize("raw", [{"lora_alpha": 0}, {"alpha_pattern": {"q_proj": 0.0}}])
def test_alpha_of_zero_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(FindingsError, match="is 0: every delta would be zero"):
        AdapterConfig.parse({"r": 8, "lora_alpha": 16, **raw})


def test_other_kinds_of_adapter_are_refused() -> None:
    with pytest.raises(UsageError, match="IA3"):
        AdapterConfig.parse({"peft_type": "IA3"})


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|b)*x", "(", "x{99999999999}", ".*" * 9, "(" * 3000, "a" * 5000])
def test_patterns_that_are_broken_or_could_hang_are_refused(pattern: str) -> None:
    with pytest.raises(UsageError):
        AdapterConfig.parse({"r": 8, "lora_alpha": 16, "rank_pattern": {pattern: 4}})


def test_long_alternations_as_tools_write_them_are_accepted() -> None:
    regex = (
        r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp).*?(?:q_proj|k_proj|v_proj|o_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))"
    )
    config = AdapterConfig.parse({"r": 8, "lora_alpha": 16, "target_modules": regex})
    assert config.targets("model.layers.11.self_attn.q_proj")
    assert not config.targets("model.layers.11.self_attn.out")


def test_target_modules_match_suffixes_at_dots_and_unknown_ones_are_listed() -> None:
    targets = ["attn.proj", "qkv", "linear_fc1", "in_proj_qkv", "in_proj_z", "q_proj", "nowhere"]
    paths = [
        "visual.blocks.0.attn.proj", "visual.blocks.0.attn.qkv", "visual.merger.linear_fc1",
        "model.layers.0.linear_attn.in_proj_qkv", "model.layers.0.linear_attn.in_proj_z",
        "model.layers.1.self_attn.q_proj", "model.layers.0.xattn.proj",
    ]  # fmt: skip
    config = AdapterConfig.parse({"r": 8, "lora_alpha": 16, "target_modules": targets, "task_type": "SEQ_2_SEQ_LM"})
    assert [config.targets(path) for path in paths] == [True] * 6 + [False]
    assert unmatched_targets(config.target_modules, paths) == ["nowhere"]


def test_layers_to_transform_and_exclusions_narrow_the_targets() -> None:
    config = AdapterConfig.parse(
        {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "layers_to_transform": [1, 3],
         "exclude_modules": ["layers.3.self_attn.q_proj"], "modules_to_save": ["lm_head"]}
    )  # fmt: skip
    assert [i for i, path in enumerate(LAYERS) if config.targets(path)] == [1]


@pytest.mark.parametrize(
    ("init", "moved"),
    [(True, False), (False, False), ("gaussian", False), ("eva", False), ("orthogonal", False), ("mica", False),
     ("pissa", True), ("pissa_niter_16", True), ("olora", True), ("corda", True), ("loftq", True), ("lora_ga", True),
     ("tomorrow", True)],
)  # fmt: skip
def test_initialisations_that_move_the_base(init: bool | str, moved: bool) -> None:
    config = AdapterConfig.parse({"r": 8, "lora_alpha": 16, "init_lora_weights": init})
    assert (config.base_moved_by() is not None) == moved


def test_to_dict_reads_back_the_same() -> None:
    config = AdapterConfig.parse(
        {"r": 4, "lora_alpha": 0.5, "target_modules": ["q_proj"], "rank_pattern": {"k": 3}, "bias": "all",
         "target_parameters": ["mlp.experts.down_proj"], "layers_to_transform": [0], "use_rslora": True,
         "peft_version": "0.21"}
    )  # fmt: skip
    again = AdapterConfig.parse(json.loads(json.dumps(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert (again.rank_pattern, again.target_parameters, again.lora_alpha) == (
        {"k": 3},
        ("mlp.experts.down_proj",),
        0.5,
    )


def test_pattern_rule_agrees_with_peft_on_random_keys() -> None:
    from peft.utils.other import get_pattern_key

    seed = 7
    rng = random.Random(seed)
    words = ["layers", "1", "11", "q_proj", "self_attn", "model", ".*", r"\d+", "^", "(q|k)_proj"]
    for _ in range(500):
        key = ".".join(rng.sample(words, rng.randint(1, 3)))
        path = rng.choice([*LAYERS, "q_proj", "model.layers.11.self_attn.k_proj"])
        matched = re.match(rf"(.*\.)?({key})$", path) is not None
        assert key_matches(key, path) == matched == (get_pattern_key([key], path) == key or path == key), (
            seed,
            key,
            path,
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "bias", "init_lora_weights",
     "layers_pattern", "modules_to_save", "use_bdlora", "peft_type", "target_parameters", "layers_to_transform",
     "task_type", "other"]
)  # fmt: skip


@given(st.dictionaries(KEYS, JSON, max_size=5))
def test_no_configuration_gives_a_traceback(raw: dict[str, Any]) -> None:
    try:
        config = AdapterConfig.parse(raw)
    except RlctlError:
        return
    assert config.scaling("model.layers.0.self_attn.q_proj").r >= 1
    json.dumps(config.to_dict(), allow_nan=False, default=str)
