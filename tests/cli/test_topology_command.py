"""``rlctl topology`` as people call it."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
import threading
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


def test_a_dump_of_a_file_a_pipe_and_stdin(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = DUMPS / "h100_8gpu_10nic_legend.txt"
    found = document(capfd, "--from", str(file))
    assert (len(found["devices"]), len(found["nics"]), len(found["links"])) == (8, 10, 153)
    assert {"a": "GPU6", "b": "NIC6", "type": "PIX"} in found["links"]
    assert "NIC9  SYS" in topology(capfd, "--from", str(file))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(file.read_bytes()))
    writer.start()
    assert document(capfd, "--from", str(pipe))["links"] == found["links"]
    writer.join()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert document(capfd, "--from", "-")["links"] == found["links"]


def test_a_damaged_dump_is_refused_with_its_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = DUMPS / "damaged_header.txt"
    found = document(capfd, "--from", str(file), code=2)
    assert found["error"]["where"] == f"{file}:1"
    assert "'CPU Affinit'" in found["error"]["message"]
    assert document(capfd, "--from", str(tmp_path), code=2)["error"]["message"] == "a folder, not a dump"


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
    clean.setenv("NCCL_DEBUG", "\x1b[31mred\nline")
    assert main(["topology", "--check"]) == 4
    shown = capfd.readouterr()
    assert "NCCL_DEBUG=\\x1b[31mred\\nline is no value that it takes" in shown.out
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


def test_the_report_for_a_bug_and_how_nodes_differ(
    capfd: pytest.CaptureFixture[str], clean: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clean.setenv("RLCTL_BENCH_TOKEN", "hush")
    clean.setenv("NCCL_DEBUG", "INFO")
    text = topology(capfd, "--env")
    assert re.search(r"RLCTL_BENCH_TOKEN +\(set, not shown\)  environment", text)
    assert socket.gethostname() not in text.split("# environment")[1].split()
    found = document(capfd, "--env")
    assert found["environment"]["variables"]["NCCL_DEBUG"] == "INFO"
    assert "hush" not in json.dumps(found)
    (tmp_path / "a.json").write_text(json.dumps(found))
    found["host"], found["environment"]["packages"]["torch"] = "other", "1.0"
    (tmp_path / "b.json").write_text(json.dumps(found))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert "  1.0  <- other" in topology(capfd, "--merge", *files)
    merged = document(capfd, "--merge", *files, "--check", code=4)
    assert [d["what"] for d in merged["differences"]] == ["package torch"]
    assert document(capfd, "--merge", files[0], files[0])["differences"] == []
    for words in ([files[0]], [*files, "--profile", "cpu-quickstart"], ["absent.json", files[0]]):
        assert "error" in document(capfd, "--merge", *words, code=2)


def test_pictures(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dump = ["--from", str(DUMPS / "one_gpu_one_nic.txt")]
    assert main(["topology", *dump, "--plot", str(tmp_path / "n.png")]) == 0
    assert main(["topology", "--profile", "cpu-separate", "--plot", str(tmp_path / "p.svg")]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["n.png", "p.svg"]
    capfd.readouterr()
    assert "a picture is .svg or .png" in document(capfd, *dump, "--plot", "n.pdf", code=2)["error"]["message"]
    assert "error" in document(capfd, *dump, "--plot", str(tmp_path / "nowhere/n.png"), code=2)
    monkeypatch.setattr("rlctl.report.plots.can_plot", lambda: False)
    refused = document(capfd, *dump, "--plot", str(tmp_path / "n.png"), code=3)
    assert refused["error"]["fix"] == "pip install 'rlctl[plots]'"
