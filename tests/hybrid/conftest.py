"""Four ranks, started once for all tests that need no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hybrid.world import World, world


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> Iterator[World]:
    with world(4, tmp_path_factory.mktemp("ranks")) as started:
        yield started
