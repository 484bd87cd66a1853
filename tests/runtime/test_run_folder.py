"""What killed runs leave is ended by the next run, and nothing else is."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.runtime.launch.run_folder import RunFolder, end_leftovers
from tests.test_process import gone

# A run whose child does not die with it; it prints its folder and the child's id.
RUN = """
import os, subprocess, sys, time
from rlctl.runtime.launch.run_folder import RunFolder
folder = RunFolder()
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], env={**os.environ, **folder.env})
print(folder.path, left.pid, flush=True)
time.sleep(120)
"""


@pytest.fixture(autouse=True)
def own_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders of a place of their own: other runs of this machine are none of this test's business."""
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as root:
        monkeypatch.setattr(tempfile, "tempdir", root)
        monkeypatch.setenv("TMPDIR", root)
        yield Path(root)


@pytest.fixture
def run() -> Iterator[tuple[subprocess.Popen[bytes], Path, int]]:
    process = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE)
    assert process.stdout is not None
    folder, left = process.stdout.readline().split()
    yield process, Path(os.fsdecode(folder)), int(left)
    process.kill()
    process.wait(10)
    process.stdout.close()
    if not gone(int(left), 0.0):
        os.kill(int(left), signal.SIGKILL)


def test_what_a_killed_run_left_is_ended_and_a_living_one_is_not_touched(run, own_root):
    process, folder, left = run
    assert folder.parent == own_root
    assert end_leftovers() == []
    assert folder.exists()
    assert not gone(left, 0.0)
    process.kill()
    process.wait(10)
    assert not gone(left, 0.0)
    assert end_leftovers() == [left]
    assert gone(left)
    assert not folder.exists()
    assert end_leftovers() == []


def test_a_stranger_with_another_folder_lives(run):
    process, _, left = run
    other = RunFolder()
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, **other.env}
    ) as p:
        process.kill()
        process.wait(10)
        assert end_leftovers() == [left]
        assert p.poll() is None
        p.kill()
    other.close()
    assert not other.path.exists()


def test_a_folder_is_private_and_gone_after_close(own_root):
    folder = RunFolder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert end_leftovers() == []
    folder.close()
    folder.close()
    assert list(own_root.iterdir()) == []


def test_a_long_place_for_temporary_files_is_not_used_for_sockets(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/" + "x" * 60)
    folder = RunFolder()
    try:
        assert len(str(folder.path / "session_2026-11-30_02-52-26_003818_9999999" / "sockets" / "plasma_store")) <= 107
    finally:
        folder.close()
