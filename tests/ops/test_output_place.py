"""A file that a command writes is there whole or not at all, and nothing else is left beside it."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlctl.ops import output_place
from rlctl.ops.output_place import whole_file


@pytest.fixture(params=["nameless", "named"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; also as on a file system that has no files without a name."""
    if request.param == "named":
        monkeypatch.setattr(output_place.os, "O_TMPFILE", os.O_DIRECTORY)
    return tmp_path


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("length", [5, 253, 255])
def test_a_name_of_any_length_that_a_file_can_have(place: Path, length: int) -> None:
    path = place / ("x" * length)
    for data in (b"one", b"another"):
        with whole_file(path) as file:
            file.write(data)
        assert path.read_bytes() == data
        assert _names(place) == [path.name]
        assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_two_at_once_each_write_their_own(place: Path) -> None:
    path = place / "page"
    with whole_file(path) as first, whole_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"
    assert _names(place) == ["page"]


def test_an_error_leaves_what_was_there(place: Path) -> None:
    path = place / "page"
    path.write_bytes(b"before")
    for fault in (ValueError, KeyboardInterrupt):
        with pytest.raises(fault), whole_file(path) as file:
            file.write(b"half")
            raise fault
    with full_disk(1000), pytest.raises(OSError, match="too large"), whole_file(path) as file:
        file.write(bytes(2000))
    assert path.read_bytes() == b"before"
    assert _names(place) == ["page"]


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        with whole_file(tmp_path / "page") as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert _names(tmp_path) == []


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
