"""Four ranks, started once for all tests of a file that need no others: groups of engines that were, stay in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hybrid.world import World, world


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[World]:
    with world(4, tmp_path_factory.mktemp("ranks")) as started:
        yield started
