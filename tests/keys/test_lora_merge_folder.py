"""Folders of adapters merged into folders of models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlctl.errors import RlctlError, UsageError
from rlctl.keys.convert import Conversion, prepare
from rlctl.keys.lora.adapter import Adapter
from tests.keys.exported_adapters import LAYER, Q


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8} | config))
    return folder


def test_folders_that_are_no_sound_adapter_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RlctlError):
        Adapter.open(tmp_path / "empty")
    good = write(tmp_path / "good", LAYER, {})
    assert len(Adapter.open(good).contents.modules) == 1
    data = (good / "adapter_model.safetensors").read_bytes()
    for cut in (0, 7, 40, len(data) - 1):
        (good / "adapter_model.safetensors").write_bytes(data[:cut])
        with pytest.raises(RlctlError):
            Adapter.open(good)
    (good / "adapter_model.safetensors").unlink()
    (good / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"adapter_model\.bin"):
        Adapter.open(good)


def merge_folder(base: Path, lora: Path, out: Path, *, verify: bool = False) -> dict[str, Any]:
    return prepare(Conversion(base, "hf", adapter=lora, merge=True)).write(out, durable=False, verify=verify)


def test_a_merge_that_fails_leaves_nothing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(16, 16)}, base / "model.safetensors")
    (base / "config.json").write_text('{"model_type": "odd"}')
    idle = {f"{Q}.lora_A.weight": torch.ones(2, 16), f"{Q}.lora_B.weight": torch.zeros(16, 2)}
    with pytest.raises(RlctlError, match="nothing merged"):
        merge_folder(base, write(tmp_path / "idle", idle, {}), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "idle"]
    report = merge_folder(base, write(tmp_path / "good", LAYER, {"enable_lora": None}), tmp_path / "out")
    assert (report["counts"]["converted"], report["counts"]["merged"]) == (1, 1)
    assert any("enable_lora" in note for note in report["notes"])
    merged = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(merged, torch.full((16, 16), 8.0))


def test_layers_of_a_hybrid_model_pass_untouched(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    tensors = {
        "model.layers.0.linear_attn.A_log": torch.randn(4), "model.layers.0.linear_attn.dt_bias": torch.randn(4),
        "model.layers.0.linear_attn.conv1d.weight": torch.randn(4, 1, 2),
        "model.embed_tokens.weight": torch.randn(8, 16),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(16, 16),
    }  # fmt: skip
    save_file(tensors, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"model_type": "some_hybrid", "tie_word_embeddings": True}))
    report = merge_folder(base, write(tmp_path / "lora", LAYER, {}), tmp_path / "out", verify=True)
    assert (report["counts"]["converted"], report["counts"]["merged"]) == (5, 1)
    assert report["recognised"][1] == "model_type 'some_hybrid' is not known: merged by names alone"
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items() if "q_proj" not in name)


MEASURE = """
import sys, torch
from pathlib import Path
from rlctl.keys.convert import Conversion, prepare

def merge_folder(base, adapter, out):
    prepare(Conversion(base, "hf", adapter=adapter, merge=True)).write(out, durable=False)

def status(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) << 10

work = Path(sys.argv[1])
merge_folder(work / "small", work / "small-lora", work / "warm")
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
merge_folder(work / "base", work / "lora", work / "out")
print(status("VmHWM") - before)
"""


def test_a_merge_needs_one_tensor_of_memory(tmp_path: Path) -> None:
    for name, size in (("small", 64), ("base", 4096)):
        at = "model.layers.{}.self_attn.q_proj.weight"
        base = tmp_path / name
        base.mkdir()
        save_file(
            {at.format(i): torch.ones(size, size, dtype=torch.bfloat16) for i in range(5)}, base / "model.safetensors"
        )
        (base / "config.json").write_text('{"model_type": "odd"}')
        lora = {}
        for i in range(5):
            lora[f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight"] = torch.ones(2, size)
            lora[f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_B.weight"] = torch.ones(size, 2)
        write(tmp_path / ("small-lora" if name == "small" else "lora"), lora, {})
    (tmp_path / "measure.py").write_text(MEASURE)
    command = [sys.executable, str(tmp_path / "measure.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    largest = 4096 * 4096 * 2
    assert int(done.stdout) <= largest + (64 << 20)
