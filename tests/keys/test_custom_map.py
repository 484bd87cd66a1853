"""A user's own map: split, concat, transpose and drop, held to the same rules as the built-in schemes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.errors import FindingsError, UsageError
from rlctl.keys.convert import Conversion, prepare
from rlctl.keys.custom_map import read_map
from rlctl.keys.plan import PlanError
from tests.keys.tiny_models import load, logits, save

GPT = r"""
rules:
  - match: 'wte'
    to: 'model.embed_tokens.weight'
  - match: 'head'
    to: 'lm_head.weight'
  - match: 'h(\d+)\.attn\.qkv\.(weight|bias)'   # one above the other
    to: ['model.layers.\1.self_attn.q_proj.\2', 'model.layers.\1.self_attn.k_proj.\2',
         'model.layers.\1.self_attn.v_proj.\2']
    split: 0
  - match: 'h(\d+)\.attn\.out'                   # stored (in, out)
    to: 'model.layers.\1.self_attn.o_proj.weight'
    transpose: true
  - match: ['h(\d+)\.down_left', 'h(\d+)\.down_right']
    to: 'model.layers.\1.mlp.down_proj.weight'
    concat: 1
  - match: 'h(\d+)\.mlp'                         # transposed and fused
    to: ['model.layers.\1.mlp.gate_proj.weight', 'model.layers.\1.mlp.up_proj.weight']
    split: 0
    transpose: true
  - match: 'h(?P<layer>\d+)\.(?P<rest>.*layernorm)'
    to: 'model.layers.\g<layer>.\g<rest>.weight'
  - match: '.*\.mask'
    drop: a constant mask
"""


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {"wte": weights["model.embed_tokens.weight"], "model.norm.weight": weights["model.norm.weight"]}
    out["head"] = weights["lm_head.weight"]
    for layer in (0, 1):
        at, to = f"model.layers.{layer}.", f"h{layer}."
        for leaf in ("weight", "bias"):
            out[f"{to}attn.qkv.{leaf}"] = torch.cat([weights[f"{at}self_attn.{p}_proj.{leaf}"] for p in "qkv"])
        out[f"{to}attn.out"] = weights[f"{at}self_attn.o_proj.weight"].T.contiguous()
        left, right = weights[f"{at}mlp.down_proj.weight"].split([10, 38], dim=1)
        out[f"{to}down_left"], out[f"{to}down_right"] = left.contiguous(), right.contiguous()
        fused = torch.cat([weights[f"{at}mlp.{p}_proj.weight"] for p in ("gate", "up")])
        out[f"{to}mlp"] = fused.T.contiguous()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{to}{norm}"] = weights[f"{at}{norm}.weight"]
        out[f"{to}mask"] = torch.ones(2, 2)
    return out


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 under names of a house's own."""
    folder = tmp_path_factory.mktemp("foreign")
    save("qwen2", folder / "hf", shard="1GB", tie_word_embeddings=False)
    weights = load_file(folder / "hf" / "model.safetensors")
    (folder / "own").mkdir()
    (folder / "own" / "config.json").write_text((folder / "hf" / "config.json").read_text())
    save_file(renamed(weights), folder / "own" / "model.safetensors")
    (folder / "map.yaml").write_text(GPT)
    return folder


def test_a_mapped_model_is_the_same_model(foreign: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the names are of no scheme known for this model"):
        prepare(Conversion(foreign / "own", "hf"))
    prepared = prepare(Conversion(foreign / "own", "hf", map_file=foreign / "map.yaml"))
    assert prepared.warnings == []
    assert {reason for _, reason in prepared.dropped} == {"a constant mask"}
    rows = {row["target"]: row for row in prepared.rows()}
    assert rows["model.layers.0.self_attn.k_proj.bias"]["transforms"] == ["split"]
    assert rows["model.layers.0.mlp.up_proj.weight"]["transforms"] == ["split", "transpose"]
    assert rows["model.layers.1.mlp.down_proj.weight"]["transforms"] == ["concat"]
    prepared.write(tmp_path / "hf", verify=True)
    assert (logits(load(tmp_path / "hf")) - logits(load(foreign / "hf"))).abs().max() <= 1e-6
    # Straight on to another scheme, and back.
    prepare(Conversion(foreign / "own", "megatron", map_file=foreign / "map.yaml", tp=2)).write(tmp_path / "mg")
    prepare(Conversion(tmp_path / "mg", "hf")).write(tmp_path / "back")
    one, other = (load_file(path / "model.safetensors") for path in (foreign / "hf", tmp_path / "back"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_that_only_the_map_knows(foreign: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "model.safetensors").write_bytes((foreign / "own" / "model.safetensors").read_bytes())
    text = GPT.replace("    split: 0\n  - match: 'h(\\d+)\\.attn\\.out'", "    split: 0\n    sizes: [32, 16, 16]\n"
                       "  - match: 'h(\\d+)\\.attn\\.out'")  # fmt: skip
    (tmp_path / "map.yaml").write_text(text)
    prepared = prepare(Conversion(own, "hf", map_file=tmp_path / "map.yaml"))
    assert any("the architecture is not known" in note for note in prepared.notes)
    prepared.write(tmp_path / "hf", verify=True)
    right = load_file(foreign / "hf" / "model.safetensors")
    made = load_file(tmp_path / "hf" / "model.safetensors")
    assert right.keys() == made.keys()
    assert all(torch.equal(right[name], made[name]) for name in right)
    with pytest.raises(UsageError, match="architecture is not known"):
        prepare(Conversion(own, "megatron", map_file=tmp_path / "map.yaml"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("- {match: 'wte', to: 'lm_head.weight'}", "wte: becomes lm_head.weight, as head does"),
        ("- {match: 'wte', to: 'model.embed.weight'}", "which this model does not have"),
        ("- {match: 'wte', to: 'model.embed_tokens.weight', transpose: true}", r"of shape \[32, 99\], not \[99, 32\]"),
        ("- {match: ['wte', 'nothing'], to: 'model.embed_tokens.weight', concat: 0}", "no tensor matches nothing"),
        (
            "- {match: 'wte', to: ['model.norm.weight', 'lm_head.weight'], split: 4}",
            "be split along dimension 4",
        ),
    ],
)
def test_names_that_collide_or_do_not_fit(foreign: Path, tmp_path: Path, rules: str, message: str) -> None:
    (tmp_path / "map.yaml").write_text(
        GPT.replace("  - match: 'wte'\n    to: 'model.embed_tokens.weight'", f"  {rules}")
    )
    with pytest.raises(PlanError, match=message):
        prepare(Conversion(foreign / "own", "hf", map_file=tmp_path / "map.yaml"))


def test_a_rule_without_effect_is_a_warning(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text(GPT + "  - {match: 'never', drop: 'whatever'}\n")
    prepared = prepare(Conversion(foreign / "own", "hf", map_file=tmp_path / "map.yaml"))
    assert len(prepared.warnings) == 1
    assert "matches no name" in prepared.warnings[0]
    with pytest.raises(PlanError):
        prepared.check(strict=True)


FAULTY = r"""
rules:
  - {mach: 'a', to: 'b'}
  - {match: '(', to: 'b'}
  - {match: '(a+)+', to: 'b'}
  - {match: '.*x.*y.*z.*', to: 'b'}
  - {match: 'a', to: ['b', 'c']}
  - {match: ['a', 'b'], to: 'c'}
  - {match: 'a', to: 'b\2'}
  - {match: 'a'}
  - {match: 'a', to: 'b', split: 'rows'}
  - 7
"""


def test_every_fault_of_a_map_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text(FAULTY)
    with pytest.raises(FindingsError) as error:
        read_map(tmp_path / "map.yaml")
    text = str(error.value)
    for line, message in (
        (3, "unknown key 'mach'; did you mean 'match'?"),
        (4, "is not a regular expression"),
        (5, "repeats a group that repeats"),
        (6, "open-ended repeats"),
        (7, "several names in 'to' go with split"),
        (8, "several patterns in 'match' go with concat"),
        (9, "refers to group 2"),
        (10, "to is missing"),
        (11, "split must be a dimension"),
        (12, "a rule must be a mapping"),
    ):
        assert any(f"map.yaml:{line}: " in one and message in one for one in text.splitlines()), (line, message, text)


@pytest.mark.parametrize("text", ["", "rules: {}", "- a", "rules: [", "rules: [&a [*a]]", "\x00", "a: b: c", "! !!x"])
def test_what_is_no_map_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "map.yaml").write_text(text)
    with pytest.raises((UsageError, FindingsError)):
        read_map(tmp_path / "map.yaml")


def test_matching_ends_soon_whatever_the_names(foreign: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text((foreign / "own" / "config.json").read_text())
    save_file({f"{'x' * 480}{i}": torch.zeros(1) for i in range(20)}, own / "model.safetensors")
    (tmp_path / "map.yaml").write_text(json.dumps({"rules": [{"match": ".*x.*x.*y", "to": "lm_head.weight"}]}))
    start = time.process_time()
    prepared = prepare(Conversion(own, "hf", map_file=tmp_path / "map.yaml"))
    assert len(prepared.findings) > 20
    assert time.process_time() - start < 20
