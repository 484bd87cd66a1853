"""``rlctl train`` on vLLM: two trainer ranks, a replica, weights between them; and nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]


def arguments(run: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "rlctl", "train", "--profile", "cpu-vllm", "--run-dir", str(run),
        "run.validate_before=false", *more,
    ]  # fmt: skip


def metrics(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_steps_on_vllm_and_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen(arguments(run, "--steps", "500"), cwd=ROOT, stdout=log, stderr=log)
    try:
        until(lambda: len(metrics(run)) >= 2 or driver.poll() is not None, "two steps", 400)
        assert driver.poll() is None, (tmp_path / "log").read_text()
        for step in metrics(run):
            assert step["logprob_gap_max"] < 3e-5  # rounding over long responses; stale weights are off by 1e-3
        processes = psutil.Process(driver.pid).children(recursive=True)
        assert any("EngineCore" in " ".join(process.cmdline()) for process in processes)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait(20)
    until(lambda: not any(process.is_running() for process in processes), "the end of all processes", 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        ("sync", "ipc"), ("separate_async", "ipc"), ("sync", "gloo"),
        pytest.param("sync", "nixl", marks=pytest.mark.nixl),
        pytest.param("sync", "mooncake", marks=pytest.mark.mooncake),
    ],
)  # fmt: skip
def test_the_cycle_task_is_learned(tmp_path: Path, mode: str, backend: str) -> None:
    steps = "8" if mode == "separate_async" else "6"
    command = arguments(tmp_path / "run", "--mode", mode, f"sync.backend={backend}", "--steps", steps, "--json")
    begin = time.monotonic()
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, timeout=580, env={**os.environ, "CI": "1"}
    )
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout)
    print(mode, backend, f"{time.monotonic() - begin:.0f} s", result["eval"]["after"])
    assert result["mode"] == mode and result["eval"]["after"] >= 0.9


@pytest.mark.slow
def test_adapters_alone_are_what_vllm_computes_with(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = arguments(
        run, "--steps", "3", "model.lora.rank=8", "model.lora.sync=adapter", "trainer.optimizer.lr=1e-3"
    )
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, timeout=580)
    assert done.returncode == 0, done.stderr.decode()
    assert all(step["logprob_gap_max"] < 3e-5 for step in metrics(run))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    sent = [event["bytes"] for event in events if event["kind"] == "sync_ended"]
    assert len(sent) == 4
    assert max(sent[1:]) < sent[0] / 5
