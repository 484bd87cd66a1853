"""A sync bench that is killed leaves no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_LISTENING = """
import os, signal
from rlctl.ops.sync_bench_hosts import other_host
from rlctl.ops.sync_bench_link import Address

def say(text):
    if text.startswith("listening"):
        print(*os.listdir(os.environ["TMPDIR"]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

with other_host(Address("127.0.0.1", 0), None, 30, say):
    pass
"""
_RAW = """
import os, signal
from rlctl.ops.sync_bench_contest import RawContestant, SyncContestant
from rlctl.sync.engine import EngineOptions

base = SyncContestant("gloo", [], 1, 1, EngineOptions(token="killed"))
raw = RawContestant(base, "")
print(*os.listdir(os.environ["TMPDIR"]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("program", "prefix"), [(_LISTENING, "rlctl-sync-bench-token-"), (_RAW, "rlctl-bench-")])
def test_nothing_is_left(program: str, prefix: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.startswith(prefix)
    end = time.monotonic() + 20
    while list(tmp_path.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.05)
