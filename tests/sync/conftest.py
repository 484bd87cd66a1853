"""Processes shared by all tests of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlctl.sync.backends import mooncake_transport
from rlctl.sync.backends.mooncake import MooncakeEngine
from rlctl.sync.backends.mooncake_transport import Transport
from rlctl.sync.engine import EngineOptions, Member
from tests.sync.mooncake_pair import Pair
from tests.sync.squad import Pool, runnable


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Member processes; they start when a test first needs them, and stay."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def library() -> Transport:
    """This process's Transfer Engine."""
    runnable("mooncake")
    return mooncake_transport.shared("127.0.0.1", "tcp", "")


@pytest.fixture
def mooncakes(library: Transport) -> Iterator[Pair]:
    """A trainer and a worker in this process."""
    options = EngineOptions(bucket_size=1 << 20, timeout=20.0, token="one run")  # noqa: S106
    engines = (MooncakeEngine(Member("trainer", 0, 1), options), MooncakeEngine(Member("rollout", 0, 1), options))
    yield engines
    for engine in engines:
        engine.close()
