"""Naming the model that a plan is made for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlctl.errors import UsageError
from rlctl.keys.presets import preset_config
from rlctl.ops.planned_model import planned_model
from rlctl.tasks.builtin_models import builtin_model_path

CYCLE = builtin_model_path("cycle-tiny")


def test_every_way_to_name_a_model(tmp_path: Path) -> None:
    assert CYCLE is not None
    builtin = planned_model("cycle-tiny")
    assert builtin.nbytes == sum(w.nbytes for w in builtin.weights) == 4 * 427_136
    assert {w.dtype for w in builtin.weights} == {"F32"}
    assert planned_model("cycle-tiny", "BF16").nbytes == builtin.nbytes // 2
    for way in (CYCLE, CYCLE / "config.json", CYCLE / "model.safetensors"):
        assert planned_model(str(way)).nbytes == builtin.nbytes
    config = tmp_path / "config.json"
    config.write_text(json.dumps(preset_config("qwen3-8b")))
    for name in ("qwen3-8b", "Qwen/Qwen3-8B", "someone/Qwen3-8B-Base", str(config), str(tmp_path)):
        assert planned_model(name).nbytes == 2 * 8_190_735_360, name


def test_files_without_a_configuration_are_planned_by_their_headers(tmp_path: Path) -> None:
    tensors = {
        "model.layers.3.self_attn.q_proj.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
        "model.layers.3.mlp.down_proj.weight": torch.zeros(4, 12, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(10, 4),
        "odd": torch.zeros(()),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    planned = planned_model(str(tmp_path))
    assert planned.spec is None
    assert planned.nbytes == 64 + 96 + 160 + 4
    cuts = {w.name: (w.split.kind, w.split.dim, w.split.units, w.layer) for w in planned.weights}
    assert cuts["model.layers.3.self_attn.q_proj.weight"] == ("even", 0, 8, 3)
    assert cuts["model.layers.3.mlp.down_proj.weight"] == ("even", 1, 12, 3)
    assert cuts["lm_head.weight"][:2] == ("vocab", 0)
    assert "heads are not known" in planned.notes[0]


def test_files_that_are_not_as_their_configuration_says(tmp_path: Path) -> None:
    assert CYCLE is not None
    shutil.copy(CYCLE / "config.json", tmp_path)
    tensors = {"model.norm.weight": torch.zeros(128, dtype=torch.bfloat16), "adapter.scale": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    planned = planned_model(str(tmp_path))
    assert (planned.nbytes, len(planned.notes)) == (256 + 12, 2)
    assert "19 tensors of the architecture are not in the files" in planned.notes[0]
    assert "1 tensors of the files are not known to the architecture, such as adapter.scale" in planned.notes[1]
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"model.norm.weight is \[64\] in the files"):
        planned_model(str(tmp_path))


@pytest.mark.parametrize("name", ["qwen3-8", "no/such-model", "a b//c", "../x"])
def test_an_unknown_name_lists_the_presets(name: str) -> None:
    with pytest.raises(UsageError, match="neither a file or folder, nor a preset") as caught:
        planned_model(name)
    assert "kimi-k2" in str(caught.value.fix)
    assert caught.value.where == "--model"
