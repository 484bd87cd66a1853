"""The lock of a run folder is asked for without being in anybody's way."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rlctl.errors import UsageError
from rlctl.experience.records.lock import LOCK, under_way
from rlctl.runtime.run_directory import RunDirectory


def test_a_held_lock_is_seen_and_a_free_one_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert not under_way(run)
    directory = RunDirectory.open(run, resume=False)
    assert under_way(run)
    with pytest.raises(UsageError, match="in use"):
        RunDirectory.open(run, resume=True)
    directory.close()
    assert not under_way(run)
    (run / LOCK).chmod(0o400)
    assert not under_way(run)


def test_who_looks_keeps_nobody_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunDirectory.open(run, resume=False).close()
    ends = threading.Event()

    def look() -> None:
        while not ends.is_set():
            under_way(run)
            time.sleep(0)

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(50):
            RunDirectory.open(run, resume=True).close()
    finally:
        ends.set()
        for watcher in watchers:
            watcher.join()
