"""One thread for all tests; processes that start warm; tests of optional parts run where their package is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

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


# A file runs in one process from its first test to its last, so those that take longest begin, and none of them is what
# one process still does when the other has nothing left.
LONGEST = (
    "model/test_fsdp2.py", "sync/test_faults.py", "hybrid/test_engine.py", "ops/test_resume_after_kill.py",
    "ops/test_modes_benchmarks.py", "sync/test_worker.py", "hybrid/test_checkpoint_engine.py", "hybrid/test_readme.py",
    "keys/test_reference_megatron.py", "trainers/test_strangers.py", "sync/test_contract.py",
    "sync/test_delta_contract.py", "ops/test_bad_input.py", "ops/test_sync_bench_hosts.py",
    "ops/test_memory_measure.py", "hybrid/reshard/test_deltas.py",
)  # fmt: skip
TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first. Skip what this machine lacks, unless RLCTL_TEST_REQUIRE names the marker: then its
    absence is a failure."""
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    assert all(path.exists() for path in places), "a file that LONGEST names is not there"
    items.sort(key=lambda item: places.get(item.path, len(places)))
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
