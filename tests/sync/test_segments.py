"""Segments of shared memory: private, sealed, and gone with their owners."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.errors import UnavailableError, UsageError
from rlctl.sync import shared_memory
from rlctl.sync.errors import CorruptedError
from rlctl.sync.shared_memory import FOLDER, Segment, remove_leftovers, segment_name


def test_segments_are_private_sealed_and_shared() -> None:
    segment = Segment.create(10000)
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 1)
    other = Segment.attach(os.dup(segment.fd), 10000)
    segment.memory[9999] = 7
    assert int(other.memory[9999]) == 7
    with pytest.raises(CorruptedError, match="not of the 20000 announced"):
        Segment.attach(os.dup(segment.fd), 20000)
    other.close()
    segment.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where named segments lie, with nobody else's among them."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


def test_named_segments_open_by_path_and_refuse_strangers(folder: Path) -> None:
    segment = Segment.create_named(5000, run="run1", label="test")
    assert segment.path is not None
    assert segment.path.stat().st_mode & 0o777 == 0o600
    other = Segment.open_named(segment.path)
    segment.memory[0] = 9
    assert int(other.memory[0]) == 9
    assert remove_leftovers() == []  # its process lives
    segment.path.chmod(0o644)
    with pytest.raises(UsageError, match="not a private segment"):
        Segment.open_named(segment.path)
    segment.unlink()
    assert list(folder.iterdir()) == []
    with pytest.raises(UsageError, match="cannot be part of a segment's name"):
        segment_name("../x", "test")


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    code = (
        "from rlctl.sync import shared_memory; from pathlib import Path; import os, signal, sys;"
        "shared_memory.FOLDER = Path(sys.argv[1]);"
        "print(shared_memory.Segment.create_named(4096, run='killed', label='test').path.name, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    name = done.stdout.strip()
    assert [path.name for path in folder.iterdir()] == [name]
    assert remove_leftovers() == [name]
    assert list(folder.iterdir()) == []


def test_too_large_a_segment_is_an_error_not_a_bus_error() -> None:
    room = os.statvfs(FOLDER)
    with pytest.raises(UnavailableError, match="no room for") as caught:
        Segment.create_named(room.f_frsize * room.f_blocks + (1 << 30), run="run1", label="huge")
    assert "--shm-size" in str(caught.value)
    assert not (FOLDER / segment_name("run1", "huge")).exists()
