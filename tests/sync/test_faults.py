"""A sync with a fault in it ends in time and legally, and the next one succeeds without a restart of the others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rlctl.sync.faults import RECEIVER, SENDER
from rlctl.sync.states import Ending
from tests.sync.drills import Trial, recover, strike
from tests.sync.squad import Managed, Pool, Squad, cases, runnable

VERSIONS = itertools.count(1, 2)
# What a further attempt in the same sync heals.
HEALED = {"flip", "swap", "drop", "repeat", "wrong_version", "stale_base"}


@pytest.fixture(params=cases())
def backend(request: pytest.FixtureRequest) -> str:
    runnable(request.param)
    return request.param


def one_trial(managed: Managed, side: str, place: int, **fault: Any) -> Trial:
    version = next(VERSIONS)
    trial = strike(managed, side, place, fault, version)
    managed.wait_for_processes()
    recover(managed, version + 1)
    return trial


def ready(pool: Pool, backend: str, commit: str, rollouts: int = 2, **policy: Any) -> Managed:
    managed = Managed(Squad(pool, backend, 1, rollouts, timeout=10.0), commit=commit, **policy)
    recover(managed, 0)
    return managed


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_damage_on_the_way_is_found_and_healed(pool: Pool, backend: str, commit: str) -> None:
    managed = ready(pool, backend, commit, timeout=8.0)
    for kind in sorted(HEALED - {"drop"}):
        trial = one_trial(managed, "sender", 0, kind=kind, at=2)
        assert trial.report.ending is Ending.COMMITTED, kind
        assert trial.report.attempts == 2, kind
    assert [e.kind for e in managed.events].count("retry") == len(HEALED) - 1


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_damage_without_a_further_attempt(pool: Pool, backend: str, commit: str) -> None:
    managed = ready(pool, backend, commit, timeout=8.0, attempts=1)
    for kind in ("flip", "swap", "repeat", "wrong_version", "stale_base", "unknown_name", "missing_name", "raise"):
        trial = one_trial(managed, "sender", 0, kind=kind, at=3)
        assert trial.error is not None, kind
        assert trial.report.ending is (Ending.FENCED if commit == "inplace" else Ending.KEPT), kind


def test_killed_sender(pool: Pool, backend: str) -> None:
    managed = ready(pool, backend, "staged")
    trial = one_trial(managed, "sender", 0, kind="kill", at=1)
    told = "; ".join(e.detail for e in managed.events if e.kind == "retry")
    assert "trainer 0 died (SIGKILL)" in told
    assert trial.error is None  # whoever runs the trainer has brought it back in time
    assert trial.report.attempts == 2


def test_killed_receiver_is_fenced_and_the_other_served(pool: Pool, backend: str) -> None:
    managed = ready(pool, backend, "inplace")
    trial = one_trial(managed, "receiver", 1, kind="kill", at=1)
    assert list(trial.report.fenced) == ["rollout 1"]
    assert trial.report.committed == ["rollout 0"]


def test_stalled_receiver_is_killed_and_the_other_served_or_fenced(pool: Pool, backend: str) -> None:
    managed = ready(pool, backend, "inplace", timeout=2.0)
    trial = one_trial(managed, "receiver", 1, kind="stall", at=1, seconds=30)
    assert "rollout 1" in trial.report.fenced


def test_stalled_sender_ends_by_the_deadline(pool: Pool, backend: str) -> None:
    managed = ready(pool, backend, "staged", timeout=2.0)
    trial = one_trial(managed, "sender", 0, kind="stall", at=1, seconds=2.5)
    assert trial.report.ending is Ending.KEPT
    assert all(served.serving is not None for served in managed.served)


@pytest.mark.parametrize("call", ["interrupt", "release_kv", "restore_kv", "resume"])
def test_replica_that_hangs_is_fenced_and_named(pool: Pool, call: str) -> None:
    managed = ready(pool, "gloo", "inplace", timeout=2.0)
    version = next(VERSIONS)
    managed.served[1].hang = call
    managed.load_version(version)
    report = managed.sync(version)
    assert call in report.fenced["rollout 1"]
    assert report.committed == ["rollout 0"]
    managed.served[1].hang = ""
    managed.served[1].finish()
    recover(managed, version + 1)


def test_every_kind_of_fault_is_named() -> None:
    assert set(RECEIVER) < set(SENDER)
    assert set(SENDER) - HEALED == {"kill", "stall", "unknown_name", "missing_name", "raise"}
