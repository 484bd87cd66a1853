"""The contract of ``delta`` for every checkpoint engine: what changes travels alone, and every bit is right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from rlctl.errors import UsageError
from rlctl.sync.deadline import Deadline
from rlctl.sync.member_process import MemberProcess
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.report import SyncError, SyncReport
from rlctl.sync.states import Ending
from tests.sync.delta_cases import LARGE, drifting
from tests.sync.squad import Managed, Pool, Squad, cases, runnable
from tests.waiting import gone

SOURCE, TARGETS = "tests.sync.delta_cases:drifting", "tests.sync.delta_cases:larger_blank"
WHOLE = sum(t.nbytes for t in drifting(0).values())
LARGE_NBYTES = sum(t.nbytes for n, t in drifting(0).items() if n in LARGE)

# In place the members alone decide, whichever engine it is.
STAGED = [*(pytest.param(*case.values, "staged", marks=case.marks) for case in cases()), ("gloo", "inplace")]


@pytest.fixture(params=cases())
def backend(request: pytest.FixtureRequest) -> str:
    runnable(request.param)
    return request.param


class Drift:
    """A squad under a manager that sends what changed."""

    def __init__(
        self,
        pool: Pool,
        backend: str,
        trainers: int,
        rollouts: int,
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        **policy: Any,
    ) -> None:
        self.squad = Squad(pool, backend, trainers, rollouts, senders=trainers, delta=True, **options)
        self.managed = Managed(self.squad, drift=True, delta=True, **policy)

    def sync(self, version: int) -> SyncReport:
        """Bring the weights of ``version`` and compare every bit."""
        self.managed.load_version(version)
        report = self.managed.sync(version)
        self.assert_served({version})
        return report

    def assert_served(self, versions: set[int | None]) -> None:
        assert {served.serving for served in self.managed.served} == versions
        self.managed.assert_whole()


def is_delta(report: SyncReport) -> bool:
    """Whether it moved less than the tensors of which little changed are."""
    assert report.ending is Ending.COMMITTED
    small = report.bytes < WHOLE - LARGE_NBYTES * 0.8
    assert small or report.bytes >= WHOLE
    return small


def killed(member: MemberProcess) -> None:
    os.kill(member.pid, signal.SIGKILL)
    assert gone(member.pid, 60.0)
    time.sleep(0.2)


@pytest.mark.parametrize(
    ("trainers", "rollouts", "commit"),
    [(1, 1, "inplace"), (1, 2, "staged"), (2, 1, "staged"), (2, 2, "inplace")],
)
def test_changes_arrive_exact_in_a_row(pool: Pool, backend: str, trainers: int, rollouts: int, commit: str) -> None:
    drift = Drift(pool, backend, trainers, rollouts, commit=commit)
    assert [is_delta(drift.sync(version)) for version in range(4)] == [False, True, True, True]


def test_replicas_join_leave_and_come_back(pool: Pool, backend: str) -> None:
    drift = Drift(pool, backend, 1, 2)
    manager, served, members = drift.managed.manager, drift.managed.served, drift.squad.rollouts.members
    (late_member,), (late,) = [members.pop()], [served.pop()]
    manager.remove(late.replica)
    assert [is_delta(drift.sync(version)) for version in (0, 1)] == [False, True]
    members.append(late_member)
    served.append(late)
    manager.add(late)
    assert not is_delta(drift.sync(2))  # an anchor for all: it has no base
    assert is_delta(drift.sync(3))
    members.pop(0)
    manager.remove(served.pop(0).replica)
    assert is_delta(drift.sync(4))
    manager.lost(late.replica, "it was restarted")
    assert not is_delta(drift.sync(5))


def test_a_trainer_that_was_restarted_says_that_it_has_no_base(pool: Pool) -> None:
    drift = Drift(pool, "gloo", 2, 1)  # for any engine: this is between the members and the manager
    assert [is_delta(drift.sync(version)) for version in (0, 1)] == [False, True]
    killed(drift.squad.trainers.members[1])
    assert not is_delta(drift.sync(2))
    assert is_delta(drift.sync(3))


@pytest.mark.parametrize(("backend", "commit"), STAGED, indirect=["backend"])
def test_after_a_failed_sync_the_next_is_made_from_what_is_served(pool: Pool, backend: str, commit: str) -> None:
    drift = Drift(pool, backend, 1, 2, commit=commit, attempts=1)
    assert [is_delta(drift.sync(version)) for version in (0, 1)] == [False, True]
    drift.managed.load_version(2)
    drift.squad.trainers.ask("inject", Deadline(20), fault={"kind": "raise", "at": 54})
    with pytest.raises(SyncError, match="the gather of big"):
        drift.managed.sync(2)
    drift.assert_served({1} if commit == "staged" else {None})
    assert is_delta(drift.sync(4)) == (commit == "staged")  # in place the live weights are no base any more
    assert is_delta(drift.sync(5))


@pytest.mark.parametrize(("backend", "commit"), STAGED, indirect=["backend"])
def test_stale_bases_are_found_and_healed_by_an_anchor(pool: Pool, backend: str, commit: str) -> None:
    drift = Drift(pool, backend, 1, 2, commit=commit)
    drift.sync(0)
    for version, fault in ((1, "stale_base"), (2, "wrong_version"), (3, "flip")):
        drift.squad.trainers.ask("inject", Deadline(20), fault={"kind": fault, "at": 1})
        report = drift.sync(version)
        assert (report.ending, report.attempts) == (Ending.COMMITTED, 2), fault
    for version, scribbled in ((4, drift.squad.rollouts.members[1]), (7, drift.squad.trainers.members[0])):
        scribbled.ask("scribble", {"name": "big.bf16"}, Deadline(20))
        report = drift.sync(version)
        assert (report.ending, report.attempts) == (Ending.COMMITTED, 2), scribbled.name
        told = [e.detail for e in drift.managed.events if e.kind == "retry"][-1]
        assert "the delta of big.bf16 " in told
        assert is_delta(drift.sync(version + 1))
        assert is_delta(drift.sync(version + 2))


@pytest.mark.parametrize("verify", ["sampled", "off"])
def test_changes_without_full_verification(pool: Pool, verify: str) -> None:
    drift = Drift(pool, "gloo", 1, 2, options={"verify": verify}, commit="staged")
    assert [is_delta(drift.sync(version)) for version in range(3)] == [False, True, True]


@pytest.mark.parametrize("senders", [1, 2])
def test_each_rank_keeps_one_copy_of_what_it_sends(pool: Pool, backend: str, senders: int) -> None:
    held = []
    for delta in (False, True):
        squad = Squad(pool, backend, senders, 1, senders=senders, delta=delta)
        squad.load(SOURCE, TARGETS, seed=0)
        held.append([s.extra_nbytes for s in squad.transfer(1).sent])
    copies = [with_it - without for without, with_it in zip(*held, strict=True)]
    assert sum(copies) == pytest.approx(WHOLE, rel=0.1, abs=2 * 8192)
    assert senders == 1 or max(copies) < 0.8 * WHOLE  # each its share: one of the tensors is half of all


def test_deltas_are_not_cast() -> None:
    with pytest.raises(UsageError, match="cannot be cast on arrival"):
        SyncPolicy(delta=True, cast=True)
