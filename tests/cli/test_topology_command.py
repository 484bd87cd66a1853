"""``rlctl topology`` as people call it."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli.root import main
from rlctl.hardware.nvml_graph import nvml_graph

DUMPS = Path(__file__).parents[1] / "hardware" / "dumps"


def topology(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["topology", *words]) == code
    return capfd.readouterr().out


def document(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    found = json.loads(topology(capfd, "--json", *words, code=code))
    assert isinstance(found, dict)
    return found


def test_this_machine_on_a_login_node(capfd: pytest.CaptureFixture[str]) -> None:
    text = topology(capfd)
    found = document(capfd)
    assert found["schema"] == "rlctl.topology/1"
    assert f"{found['machine']['cores']} cores" in text
    if not nvml_graph().gpus:
        assert "missing: no NVIDIA GPU is visible here" in text
        assert found["devices"] == []
        refused = document(capfd, "--require-gpus", code=3)
        assert "no GPU or NPU here" in refused["error"]["message"]


def test_a_dump_of_a_file_and_of_stdin(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = DUMPS / "h100_8gpu_10nic_legend.txt"
    found = document(capfd, "--from", str(file))
    assert (len(found["devices"]), len(found["nics"]), len(found["links"])) == (8, 10, 153)
    assert {"a": "GPU6", "b": "NIC6", "type": "PIX"} in found["links"]
    assert "NIC9  SYS" in topology(capfd, "--from", str(file))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert document(capfd, "--from", "-")["links"] == found["links"]


def test_a_damaged_dump_is_refused_with_its_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = DUMPS / "damaged_header.txt"
    found = document(capfd, "--from", str(file), code=2)
    assert found["error"]["where"] == f"{file}:1"
    assert "'CPU Affinit'" in found["error"]["message"]
    assert document(capfd, "--from", str(tmp_path), code=2)["error"]["message"] == "no such file"


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Take away what this process happens to have set."""
    for name in list(os.environ):
        if name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_VISIBLE", "GLOO_", "UCX_", "TP_SOCKET")):
            monkeypatch.delenv(name)
    return monkeypatch


def test_checks_of_this_machine(capfd: pytest.CaptureFixture[str], clean: pytest.MonkeyPatch) -> None:
    clean.setenv("NCCL_SOCKET_TIMEOUT", "30")
    clean.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = document(capfd, "--check", "--child-devices", "0,1,2,3", code=4)
    failed = {c["rule"]: c for c in found["checks"] if c["status"] == "fail"}
    assert {"nccl-names", "child-devices"} <= set(failed)
    assert set(failed["nccl-names"]) == {"rule", "status", "message", "fix"}
    assert "NCCL_SOCKET_RETRY_CNT" in failed["nccl-names"]["fix"]
    assert main(["topology", "--check"]) == 4
    shown = capfd.readouterr()
    assert "fail     nccl-names" in shown.out
    assert "\x1b" not in shown.out
    assert "checks failed: nccl-names" in shown.err


def test_checks_of_a_profile_on_a_dump(capfd: pytest.CaptureFixture[str], clean: pytest.MonkeyPatch) -> None:
    dump = str(DUMPS / "h100_8gpu_10nic_legend.txt")
    words = ("--check", "--profile", "8xH100-colocate", "--from", dump)
    found = document(capfd, *words)
    assert {c["status"] for c in found["checks"]} <= {"ok", "warn", "skipped"}
    assert found["placement"][3]["nic"] == "mlx5_3"
    text = topology(capfd, *words, "placement.replica_tp=3", "placement.replicas=2", code=4)
    assert "-> valid sizes: 1, 2, 4, 8, 16, 32" in text


def test_options_that_do_not_go_together(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["--model", "qwen3-8b"], ["--child-devices", "0"], ["run.steps=3"], ["--backend", "nccl"]):
        assert "error" in document(capfd, *words, code=2)
