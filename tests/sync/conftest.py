"""Processes shared by all tests of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sync.squad import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Member processes; they start when a test first needs them, and stay."""
    pool = Pool()
    yield pool
    pool.close()
