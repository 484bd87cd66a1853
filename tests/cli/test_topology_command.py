"""``rlctl topology`` as people call it."""

from __future__ import annotations

import io
import json
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
