"""The script of what only a GPU can show: it says that there is none, and its steps find wrong bits."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_check_sync import Pair, exact, main, steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the script would run")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "gpu_check_sync: no CUDA device is visible, so nothing was run\n"


def test_a_step_runs_here_and_finds_wrong_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact("naive", "cpu", 1, here=True)["tensors"] == 5
    pair = Pair("naive", "cpu", 1, here=True)
    pair.sync()
    monkeypatch.setattr(pair, "_load", lambda side, version: None)  # the trainer still has version 1
    with pytest.raises(AssertionError, match="version 2 arrived with other bits"):
        pair.sync()
    pair.close()
    assert "ipc rate" in steps("cpu", 1)
