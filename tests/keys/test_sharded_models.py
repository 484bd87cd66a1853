"""Models as FSDP2, tensor parallelism, torch.compile and DCP leave them, converted to folders that are whole again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.errors import UsageError
from rlctl.keys.convert import Conversion, prepare
from rlctl.keys.convert_model import PreparedModel
from tests.keys.tiny_models import load
from tests.warm_starts import run_module


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    done = run_module("tests.keys.save_sharded_model", [str(folder)], timeout=100)
    assert done.returncode == 0, done.stderr
    return folder


def check_equal(one: Path, other: Path) -> None:
    left, right = (load(folder).state_dict() for folder in (one, other))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_whole_training_state_in_dcp(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder of safetensors, not dcp"):
        prepare(Conversion(saved / "hf", "hf", scheme="dcp"))
    prepared = prepare(Conversion(saved / "dcp", "hf", scheme="dcp", base=saved / "hf"))
    assert isinstance(prepared, PreparedModel)
    assert prepared.opened.container.kind == "dcp"
    assert prepared.source_scheme == "hf"
    assert "the model lies under 'model' of a training state" in prepared.notes
    assert dict(prepared.dropped) == {
        "optim.step": "optimizer and run state",
        "lm_head.weight": "tied to the embedding (equal to model.embed_tokens.weight)",
    }
    prepared.write(tmp_path / "out", verify=True)
    check_equal(saved / "hf", tmp_path / "out")


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_files_of_each_rank(saved: Path, tmp_path: Path, to: str) -> None:
    prepared = prepare(Conversion(saved / "ranks", to, scheme="fsdp", base=saved / "hf", tp=2))
    assert isinstance(prepared, PreparedModel)
    assert prepared.opened.container.kind == "rank-files"
    report = prepared.write(tmp_path / "out", verify=True)
    assert report["counts"]["unknown"] == 0
    if to == "megatron":
        prepare(Conversion(tmp_path / "out", "hf")).write(tmp_path / "back")
    check_equal(saved / "hf", tmp_path / ("back" if to == "megatron" else "out"))


def test_a_missing_rank_is_a_fault(saved: Path, tmp_path: Path) -> None:
    for file in sorted((saved / "ranks").iterdir())[:3]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    prepared = prepare(Conversion(tmp_path, "hf", base=saved / "hf"))
    assert prepared.findings
    assert "a part is missing" in str(prepared.findings[0])
