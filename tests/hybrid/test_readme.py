"""The script that the README shows runs as it stands there."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 240.0


def script() -> str:
    section = (ROOT / "README.md").read_text().split("## One model, two lives: HybridEngine\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


def test_the_script_has_at_most_25_lines() -> None:
    lines = [line for line in script().splitlines() if line.strip()]
    assert len(lines) <= 25


def test_the_script_trains_and_reports(tmp_path: Path) -> None:
    file = tmp_path / "hybrid.py"
    file.write_text(script())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        env=env,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as run:
        try:
            out, err = run.communicate(timeout=LIMIT)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, err[-3000:]
    *steps, pairs = out.strip().splitlines()
    assert [line.split()[1] for line in steps] == ["0", "1", "2"]
    rewards = [float(line.split()[3]) for line in steps]
    assert all(0.0 < reward < 1.0 for reward in rewards)
    moved = ast.literal_eval(pairs)
    # Each rank lacks something of each other's shards.
    assert len(moved) == 2 and all(nbytes > 0 for nbytes in moved.values())
