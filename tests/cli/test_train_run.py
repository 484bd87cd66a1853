"""A short real run of ``rlctl train``: what reaches a pipe and what reaches a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 3
ARGUMENTS = [
    f"run.steps={STEPS}", "run.threads=1", "run.validate_prompts=8", "trainer.prompts_per_step=2",
    "rollout.samples_per_prompt=2", "rollout.max_new_tokens=16",
]  # fmt: skip


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR", "FORCE_COLOR", "TQDM_DISABLE")}
    return kept | {"TERM": "xterm", "PYTHONUTF8": "1"}


def test_a_pipe_gets_one_document_and_plain_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlctl", "train", "--json", "--run-dir", str(tmp_path / "run"), *ARGUMENTS]
    done = subprocess.run(command, capture_output=True, env=environment(), timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()
    for stream in (done.stdout, done.stderr):
        assert b"\r" not in stream
        assert b"\x1b" not in stream
        assert stream.endswith(b"\n")
    document = json.loads(done.stdout)
    assert document["schema"] == "rlctl.train/1"
    assert document["steps"] == STEPS
    assert {"run_dir", "reward", "eval", "samples_per_s", "tokens_per_s", "params_digest"} <= set(document)
    assert {"first", "last"} <= set(document["reward"])
    assert {"before", "after"} <= set(document["eval"])
    assert document["mode"] == "sync"
    assert document["staleness"] == {"mean": 0.0, "max": 0.0, "tokens": 0.0}
    assert all(0 < document["bubble"][side] < 1 for side in ("trainer", "rollout"))
    assert document["sync"]["count"] == STEPS + 1
    assert document["sync"]["seconds"] >= document["sync"]["stall_seconds"] > 0
    assert 0 <= document["logprob_gap"]["mean"] <= document["logprob_gap"]["max"] < 1e-4
    lines = done.stderr.decode().splitlines()
    assert lines[0] == f"run folder {tmp_path / 'run'}: {STEPS} steps"
    assert len([line for line in lines if line.startswith("step ")]) == STEPS


@pytest.mark.slow
def test_a_terminal_gets_a_panel_a_curve_and_what_to_do_next(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlctl", "train", "--run-dir", str(tmp_path / "run"), *ARGUMENTS]
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment())
    os.close(follower)
    shown = b""
    while True:
        try:
            shown += os.read(leader, 65536)
        except OSError:  # the program has gone
            break
    os.close(leader)
    assert process.wait(timeout=60) == 0, shown.decode()
    text = shown.decode()
    assert "\x1b[?25l" in text
    assert text.index("\x1b[?25h") < text.index("reward by step")
    after = text[text.index("reward by step") :]
    assert "held-out accuracy  before  after" in after
    assert f"rlctl train --resume {tmp_path / 'run'} run.steps={2 * STEPS}" in after
    assert "\x1b" not in after
