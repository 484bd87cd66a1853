"""The program in docs/weight-sync.md runs as it is written, and nothing is left of one that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_the_documented_program_syncs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "weight-sync.md").read_text(), re.DOTALL)
    (program,) = [block for block in blocks if "manager.sync(" in block]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "committed True"
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_folder_of_its_workers(tmp_path: Path) -> None:
    program = """
import os, signal
from rlctl.sync.engine import EngineOptions
from rlctl.sync.worker_process import WorkerProcesses

workers = WorkerProcesses("gloo", EngineOptions(token="killed"))
print(*os.listdir(os.environ["TMPDIR"]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.startswith("rlctl-sync-")
    end = time.monotonic() + 20
    while list(tmp_path.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.05)
