"""The check for one GPU, as far as it goes without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check_hybrid import CONFIG, main
from rlctl.errors import EXIT_UNAVAILABLE
from tests.hybrid.world import World

SMALL = CONFIG | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "head_dim": 16, "intermediate_size": 96, "vocab_size": 80}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the check itself")
def test_without_a_gpu_it_says_so(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check_hybrid"])
    assert main() == EXIT_UNAVAILABLE
    assert capfd.readouterr().err == "gpu_check_hybrid: no CUDA device is visible, so nothing was run\n"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_cycles_hold_on_ranks_of_a_cpu(ranks: World, tmp_path: Path, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    found = ranks.call("benchmarks.gpu_check_hybrid:cycles", folder=str(tmp_path), device="cpu", dtype=dtype, count=3)
    assert all(all(one["checks"].values()) for one in found), [one["checks"] for one in found]
    assert all(one["sent_bytes"] > 0 for one in found)
    assert [m["moment"] for m in found[0]["timeline"]][:3] == ["trained", "switched", "cache awake"]
