"""A folder of versions, and the trainer that writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.sync.backends.file import FileEngine
from rlctl.sync.engine import Member
from tests.sync.file.published import options


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "versions"


@pytest.fixture
def trainer(folder: Path) -> FileEngine:
    return FileEngine(Member("trainer", 0, 1), options(folder))
