"""The words of sync-bench's command line, and the models that it takes tensors of."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlctl.cli.leaf import run
from rlctl.errors import RlctlError, UsageError
from rlctl.keys.checkpoint import CheckpointError
from rlctl.ops.sync_bench_arguments import bucket_sizes, engine_options
from rlctl.ops.sync_bench_workload import model_tensors
from rlctl.report.sync_plot import save_sync_plot

MIB = 1 << 20


def test_sizes_of_a_bucket() -> None:
    assert bucket_sizes(None, None, None, None) == [64 * MIB]
    assert bucket_sizes("1MiB,2MiB,1MiB", None, None, None) == [MIB, 2 * MIB]
    assert bucket_sizes(None, "1MiB", "16MiB", 4) == [MIB, 4 * MIB, 16 * MIB]
    assert bucket_sizes(None, None, "5MiB", None) == [MIB, 4 * MIB]
    assert bucket_sizes(None, "4KiB", "6KiB", 1.2) == [4096, 4915, 5898]


@pytest.mark.parametrize(
    ("sweep", "wrong"),
    [
        ((None, "1MiB", None, None), "needs its end"),
        (("1MiB", None, "2MiB", None), "take one of both"),
        ((None, "2MiB", "1MiB", None), "begins at"),
        ((None, "1MiB", "2MiB", 1.0), "above 1"),
        ((None, "4KiB", "1TiB", 1.1), "more than 24"),
        (("100", None, None, None), "too small"),
        ((None, "some", "1MiB", None), "not a size"),
    ],
)
def test_sweeps_that_make_no_sense(sweep: tuple[str | None, str | None, str | None, float | None], wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        bucket_sizes(*sweep)


def test_options_of_a_backend() -> None:
    given = ["file.folder=/", "file.keep=3", "gloo.a=b=c"]
    assert engine_options(given, ["all"]) == {"file": {"folder": "/", "keep": 3}, "gloo": {"a": "b=c"}}
    with pytest.raises(UsageError, match="there is no folder"):
        engine_options(["file.folder=/no/where"], ["file"])
    for odd in ("file", "file=3", "file.=3", ".keep=3", "file.keep="):
        with pytest.raises(UsageError, match="is not BACKEND"):
            engine_options([odd], ["file"])
    with pytest.raises(UsageError, match="which is not measured"):
        engine_options(["file.keep=3"], ["gloo"])
    with pytest.raises(UsageError, match="is not text"):
        engine_options([f"file.folder=/{os.fsdecode(bytes([255]))}"], ["file"])


def test_tensors_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no .safetensors file"):
        model_tensors(str(tmp_path))
    save_file({"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(0)}, tmp_path / "model.safetensors")
    found = {m.name: (m.dtype, m.shape) for m in model_tensors(str(tmp_path))}
    assert found == {"a": ("BF16", (3, 5)), "b": ("F32", (0,))}
    index = {
        "metadata": {},
        "weight_map": {"a": "model.safetensors", "b": "model.safetensors", "c": "gone.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        model_tensors(str(tmp_path))
    assert "gone.safetensors" in str(caught.value)


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RlctlError, match="cannot be written"):
        save_sync_plot(tmp_path / "gone" / "x.png", [("gloo", 1.0)], 2.0, title="")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--backend", " , "],
        ["--fail-below", "nan"],
        ["--fail-below", "0"],
        ["--compare", "nowhere.json"],
        ["--compare", "."],
        ["--plot", "."],
        ["--plot", "nowhere/x.png"],
        ["--plot", "/proc/self/x.png"],
        ["--model", "qwen2.5-0.5"],
        ["--size", "2", "--tensors", "2"],
        ["--rollouts", "100000"],
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run("sync-bench", ["--backend", "gloo", *arguments]) == 2
    assert capfd.readouterr().err.startswith("error: ")


def test_an_old_result_must_be_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.json"
    for rows in (
        [{"backend": 1}],
        [7],
        [{"backend": "gloo", "variant": "full", "bucket_size": 1, "gib_per_s": "fast"}],
    ):
        old.write_text(json.dumps({"schema": "rlctl.sync-bench/1", "rows": rows}))
        assert run("sync-bench", ["--backend", "gloo", "--compare", str(old)]) == 2
        assert "old.json" in capfd.readouterr().err
