"""What of a record survives: a process that is killed leaves whole records only; what is settled is on the disk."""

import os
import random
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlctl.experience.records import writing
from rlctl.experience.records.manifest import BATCH, MANIFEST, SUMS, recorded_steps, step_folder
from rlctl.experience.records.reading import read_bundle

from .test_records import written

pytestmark = pytest.mark.timeout(60)

WRITER = """
import sys
from pathlib import Path
from rlctl.experience.records.manifest import recorded_steps, step_folder
from rlctl.experience.records.writing import discard, settle
from tests.experience.records.test_records import written

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
for step in range(1, 1 << 30):
    written(folder, step, seed)
    if step % 3 == 0:
        settle([step_folder(folder / "records", step)])
    if step > 4:
        discard(step_folder(folder / "records", step - 4))
"""


def test_a_kill_at_any_moment_leaves_whole_records_only(tmp_path):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for attempt in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(seed)],
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parents[3],
        )
        try:
            deadline = time.monotonic() + 30
            while not recorded_steps(tmp_path / "records") or max(recorded_steps(tmp_path / "records")) < 5:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(rng.random() * 0.05)
        finally:
            process.kill()
            process.wait()
        steps = recorded_steps(tmp_path / "records")
        assert 3 <= len(steps) <= 6, (attempt, steps)
        (tmp_path / "config.json").write_text("{}")
        for step in steps:
            assert len(read_bundle(tmp_path, step).rounds) == 2
        writing.clean(tmp_path / "records")
        for step in steps:
            writing.discard(step_folder(tmp_path / "records", step))


def synced(monkeypatch):
    """Return the list to which the paths of all files and folders that are brought to the disk are added."""
    seen, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (seen.append(str(Path(f"/proc/self/fd/{handle}").readlink())), fsync(handle))
    )
    return seen


def test_a_record_is_brought_to_the_disk_when_it_is_settled(tmp_path, monkeypatch):
    written(tmp_path, 3)
    seen = synced(monkeypatch)
    written(tmp_path, 4)
    assert not [path for path in seen if "step_" in path]
    seen.clear()
    gone, records = step_folder(tmp_path / "records", 9), tmp_path / "records"
    writing.settle([step_folder(records, 3), gone, step_folder(records, 4)])
    parts = [f"{step_folder(records, step)}/{name}" for step in (3, 4) for name in (BATCH, MANIFEST, SUMS)]
    assert sorted(seen) == sorted([*parts, *(str(step_folder(records, step)) for step in (3, 4)), str(records)])
    assert seen[-1] == str(records), "a name is brought to the disk before what it names"
