"""One thread for all tests; processes that start warm; tests of optional parts run where their package is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

from tests.warm_starts import WARM

# Before torch is imported: threads that spin while they wait cost ten times the work itself on a shared machine, and
# models as small as these are slower on several.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says nothing on a machine that others share. pytest's own limit ends what hangs.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# Marker -> the module that the marked tests need.
OPTIONAL = {
    "trl": "trl", "vllm": "vllm", "nixl": "nixl_cu12", "mooncake": "mooncake", "ray": "ray",
    "tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine lacks, unless RLCTL_TEST_REQUIRE names the marker: then its absence is a failure."""
    required = os.environ.get("RLCTL_TEST_REQUIRE", "").split(",")
    for marker, module in OPTIONAL.items():
        if marker in required or find_spec(module) is not None:
            continue
        for item in items:
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=f"{module} is not installed"))


@pytest.fixture(scope="session", autouse=True)
def _warm_starts() -> Iterator[None]:
    """Processes have torch from the start, except in tests marked ``new_interpreters``."""
    with WARM:
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    WARM.enabled = item.get_closest_marker("new_interpreters") is None
