"""``rlctl convert-keys`` from the command line: what it says, its exit codes, and that nothing is half written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.keys.conftest import Rlctl
from tests.keys.tiny_models import load, logits, save

ROOT = Path(__file__).parents[2]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 12-layer Qwen2 with 2 groups, biases and an untied head, in many shards, with files beside the weights."""
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    save("qwen2", folder, shard="40KB", num_hidden_layers=12, tie_word_embeddings=False)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "optimizer.bin").write_text("not carried")
    assert len(list(folder.glob("*.safetensors"))) > 8
    return folder


def test_megatron_and_back_is_exact(rlctl: Rlctl, qwen2: Path, tmp_path: Path) -> None:
    there = rlctl(qwen2, tmp_path / "mg", "--to", "megatron", "--tp", "2", "--json").document
    assert (there["source_scheme"], there["target_scheme"]) == ("hf", "megatron")
    assert set(there["counts"]) == {"converted", "renamed", "split", "fused", "merged", "dropped", "unknown"}
    assert there["counts"]["unknown"] == 0
    assert there["bytes"] > 0
    assert there["seconds"] > 0
    assert (tmp_path / "mg" / "latest_checkpointed_iteration.txt").read_text() == "release"
    ranks = sorted((tmp_path / "mg" / "release").iterdir())
    assert [rank.name for rank in ranks] == ["mp_rank_00", "mp_rank_01"]
    assert len(torch.load(ranks[0] / "model_optim_rng.pt", weights_only=True)["model"]) == 12 * 7 + 3
    back = rlctl(tmp_path / "mg", tmp_path / "back", "--to", "hf", "--verify", "--json").document
    assert back["source_scheme"] == "megatron"
    assert back["verified"]
    reasons = Counter(entry["reason"].partition(" (")[0] for entry in back["dropped"])
    assert reasons == {"a replica": 25, "nothing but padding": 2}  # 99 rows padded to 256: rank 1 has none of them
    assert same(tensors(qwen2), tensors(tmp_path / "back"))
    carried = {"config.json", "generation_config.json", "tokenizer.json"}
    assert carried <= {file.name for file in (tmp_path / "back").iterdir()}
    assert not (tmp_path / "back" / "optimizer.bin").exists()


def test_a_dry_run_shows_all_and_writes_nothing(rlctl: Rlctl, qwen2: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    shown = rlctl(qwen2, tmp_path / "mg", "--to", "megatron", "--pp", "3", "--dry-run")
    lines = [line for line in shown.stdout.splitlines() if "linear_qkv.weight" in line]
    assert len(lines) == 12
    assert "model.layers.11.self_attn.q_proj.weight and 2 more" in lines[-1]
    assert "mp_rank_00_002:decoder.layers.3.self_attention.linear_qkv.weight" in lines[-1]
    assert "64x32" in lines[-1]
    assert "recognised: 147 of 147 names are those of the hf form" in shown.stderr
    plan = rlctl(qwen2, "--to", "megatron", "--pp", "3", "--dry-run", "--json").document
    assert len(plan["moves"]) == plan["counts"]["converted"]
    assert sorted(tmp_path.iterdir()) == before


def test_every_fault_is_named_and_nothing_is_written(rlctl: Rlctl, qwen2: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(qwen2, broken)
    weights = tensors(broken)
    for file in broken.glob("model*"):
        file.unlink()
    weights["model.layers.3.mlp.gate_up.weight"] = torch.zeros(2, 2)
    del weights["model.layers.5.self_attn.k_proj.bias"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    failed = rlctl(broken, tmp_path / "out", "--to", "hf", "--json", code=4).document
    assert failed["counts"]["unknown"] == 1
    assert {f["where"]: f["message"] for f in failed["findings"]} == {
        "model.layers.3.mlp.gate_up.weight": "unknown name in the hf form of this model",
        "model.layers.5.self_attn.k_proj.bias": "is missing",
    }
    assert [entry["name"] for entry in failed["dropped"]] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert not (tmp_path / "out").exists()
    # Unknown tensors may be left out on purpose; missing ones never.
    assert "k_proj.bias: is missing" in rlctl(broken, tmp_path / "out", "--to", "hf", "--no-strict", code=4).stderr
    weights["model.layers.5.self_attn.k_proj.bias"] = torch.zeros(16)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    partial = rlctl(broken, tmp_path / "out", "--to", "hf", "--no-strict", "--json").document
    assert partial["unknown"] == ["model.layers.3.mlp.gate_up.weight"]
    assert "model.layers.3.mlp.gate_up.weight" not in tensors(tmp_path / "out")


def test_index_and_shards_that_disagree(rlctl: Rlctl, qwen2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(qwen2 / "config.json", folder)
    one, two, three = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    save_file({"x": torch.zeros(1)}, folder / one, metadata={"format": "pt"})
    save_file({}, folder / two, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 12}, "weight_map": {"x": one, "y": two, "z": three}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    said = rlctl("--inspect", folder, "--json", code=4).document
    text = "\n".join(f"{f['where']}: {f['message']}" for f in said["findings"])
    assert three in text
    assert "'y'" in text
    assert three in rlctl(folder, tmp_path / "out", "--to", "hf", code=4).stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "megatron", "--tp", "3"), "--tp: num_key_value_heads 2 cannot be cut into 3; valid: 1, 2"),
        (("--to", "megatron", "--ep", "2"), "a dense model has no experts to share out"),
        (("--to", "peft"), "holds no adapter"),
        (("--to", "hf", "--merge"), "there is nothing to merge"),
        (("--to", "hf", "--dtype", "bf61"), "unknown dtype 'bf61'"),
        (("--to", "hf", "--from", "megatron"), "holds no megatron names"),
        (("--to", "hf", "--from", "hugging"), "known: auto, hf, hf-fused, megatron"),
        (("--to", "hf", "--max-shard-size", "5 potatoes"), "--max-shard-size"),
        (("--to", "tensorrt"), "tensorrt"),
        ((), "--to is missing"),
    ],
)
def test_wrong_arguments_say_what_is_right(
    rlctl: Rlctl, qwen2: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    assert message in rlctl(qwen2, tmp_path / "out", *words, code=2).stderr
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_only_replaced_on_request(rlctl: Rlctl, qwen2: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rlctl(qwen2, out, "--to", "hf", "--dtype", "bf16")
    assert "exists already" in rlctl(qwen2, out, "--to", "hf", code=2).stderr
    assert {t.dtype for t in tensors(out).values()} == {torch.bfloat16}
    rlctl(qwen2, out, "--to", "hf", "--overwrite")
    assert {t.dtype for t in tensors(out).values()} == {torch.float32}
    assert "lie in, hold or replace its own source" in rlctl(out, out, "--to", "hf", "--overwrite", code=2).stderr


def test_unknown_architectures_are_refused(rlctl: Rlctl, qwen2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(qwen2, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen22"}))
    failed = rlctl(folder, tmp_path / "out", "--to", "hf", code=2)
    assert "unknown model_type 'qwen22'" in failed.stderr
    assert "did you mean 'qwen2'?" in failed.stderr
    (folder / "config.json").unlink()
    assert "give the folder that holds it with --base" in rlctl(folder, tmp_path / "out", "--to", "hf", code=2).stderr
    rlctl(folder, tmp_path / "out", "--to", "hf", "--base", qwen2, "-q")


def test_names_of_two_schemes_at_once_are_refused(rlctl: Rlctl, tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path / "moe")
    weights = {name: t for name, t in tensors(tmp_path / "moe").items() if ".experts." not in name}
    for file in (tmp_path / "moe").glob("model*"):
        file.unlink()
    save_file(weights, tmp_path / "moe" / "model.safetensors", metadata={"format": "pt"})
    failed = rlctl(tmp_path / "moe", tmp_path / "out", "--to", "hf", code=2)
    assert "ambiguous: 23 of 23 names are those of hf and of hf-fused" in failed.stderr
    named = rlctl(tmp_path / "moe", tmp_path / "out", "--to", "hf", "--from", "hf-fused", code=4)
    assert "model.layers.1.mlp.experts.down_proj: is missing" in named.stderr
    assert not (tmp_path / "out").exists()


def test_an_inspection_tells_what_is_there(rlctl: Rlctl, qwen2: Path, tmp_path: Path) -> None:
    seen = rlctl("--inspect", qwen2, "--json").document
    assert (seen["scheme"], seen["model_type"], seen["tensors"], seen["findings"]) == ("hf", "qwen2", 147, [])
    assert seen["dtypes"] == {"F32": 147}
    assert seen["bytes"] == sum(t.numel() * 4 for t in tensors(qwen2).values())
    assert seen["files"] == len(list(qwen2.glob("*.safetensors")))
    save("qwen2", tmp_path / "tied")
    said = rlctl("--inspect", tmp_path / "tied").stdout
    assert "note: the head is tied to the embedding" in said
    assert "missing" not in said
    rlctl(qwen2, tmp_path / "mg", "--to", "megatron", "--tp", "2", "--pp", "2")
    assert rlctl("--inspect", tmp_path / "mg", "--json").document["scheme"] == "megatron"


def test_reading_a_plan_loads_no_torch(qwen2: Path) -> None:
    code = (
        "import sys; from rlctl.cli import main; "
        f"main(['convert-keys', {str(qwen2)!r}, '--to', 'megatron', '--dry-run']); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_wrapped_models_are_cleaned(rlctl: Rlctl, tmp_path: Path) -> None:
    model = save("qwen3", tmp_path / "hf")
    weights = tensors(tmp_path / "hf")
    for file in (tmp_path / "hf").glob("model*"):
        file.unlink()
    wrapped = {
        f"module._orig_mod._fsdp_wrapped_module.{n.replace('.mlp.', '._checkpoint_wrapped_module.mlp.')}": t
        for n, t in weights.items()
    }
    save_file(wrapped, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    said = rlctl(tmp_path / "hf", tmp_path / "clean", "--to", "hf", "--json").document
    assert said["counts"]["renamed"] == len(weights)
    assert any(f"{len(weights)} keys stripped" in note for note in said["notes"])
    assert (logits(load(tmp_path / "clean")) - logits(model)).abs().max() <= 1e-5
