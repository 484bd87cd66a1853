"""One contract for every checkpoint engine that can run on this machine: real processes, exact bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.sync.deadline import Deadline
from rlctl.sync.digest import Verify
from rlctl.sync.errors import MismatchError
from rlctl.sync.member import described
from rlctl.sync.states import ORDER, Ending
from tests.sync.probes import large_and_small
from tests.sync.squad import Managed, Pool, Squad, cases, described_all, runnable
from tests.sync.wire_cases import hard_tensors, wider

HARD, BLANK = "tests.sync.wire_cases:hard_tensors", "tests.sync.wire_cases:blank"


@pytest.fixture(params=cases())
def backend(request: pytest.FixtureRequest) -> str:
    runnable(request.param)
    return request.param


def assert_arrived(squad: Squad, seed: int) -> None:
    for digests in squad.digests():
        assert digests == described_all(seed)


@pytest.mark.parametrize(("trainers", "rollouts", "senders"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 2), (2, 1, 2)])
def test_every_tensor_arrives_exact_three_times(
    pool: Pool, backend: str, trainers: int, rollouts: int, senders: int
) -> None:
    squad = Squad(pool, backend, trainers, rollouts, senders=senders)
    for version in range(3):
        squad.load(HARD, BLANK, seed=version)
        outcome = squad.transfer(version)
        assert_arrived(squad, version)
        sent = hard_tensors(version)
        for received in outcome.received:
            assert received.report.complete
            assert sorted(received.report.loaded) == sorted(sent)
            assert received.version == version
        assert sum(s.tensors for s in outcome.sent) == len(sent)
        assert len({r.digest for r in outcome.received}) == 1


def test_ranks_that_gather_in_step_do_not_wait_for_each_other_in_a_circle(
    pool: Pool, backend: str, tmp_path: Path
) -> None:
    """A rank in the midst of a tensor larger than all buckets holds up the others' next gather: what it sends must be
    taken although nothing comes from them."""
    squad = Squad(pool, backend, 2, 2, senders=2, bucket_size=1 << 20, timeout=10.0)
    squad.load_source("tests.sync.probes:large_and_small", seed=1)
    squad.rollouts.ask("load", Deadline(60), factory="tests.sync.probes:large_and_small", arguments={"seed": 2})
    squad.transfer(1, in_step=str(tmp_path / "meeting"))
    expected = {name: described(name, tensor) for name, tensor in large_and_small(1).items()}
    assert squad.digests() == [expected] * 2


@pytest.mark.parametrize("bucket", [256, 1000, 1 << 20])
def test_bucket_smaller_and_larger_than_tensors(pool: Pool, backend: str, bucket: int) -> None:
    squad = Squad(pool, backend, 1, 1, bucket_size=bucket)
    squad.load(HARD, BLANK, seed=9)
    squad.transfer(1)
    assert_arrived(squad, 9)


@pytest.mark.parametrize("verify", ["sampled", "off"])
def test_verification_off_and_sampled(pool: Pool, backend: str, verify: Verify) -> None:
    squad = Squad(pool, backend, 1, 1, verify=verify)
    squad.load(HARD, BLANK, seed=3)
    squad.transfer(1)
    assert_arrived(squad, 3)


def test_worker_joins_and_leaves(pool: Pool, backend: str) -> None:
    squad = Squad(pool, backend, 1, 1)
    squad.load(HARD, BLANK, seed=0)
    squad.transfer(1)
    both = Squad(pool, backend, 1, 2)
    both.load(HARD, BLANK, seed=1)
    both.transfer(2)
    assert_arrived(both, 1)
    left = both.rollouts.members.pop(0)
    assert left.name == "rollout 0"
    both.load(HARD, BLANK, seed=2)
    both.transfer(3)
    assert_arrived(both, 2)


def test_other_dtypes_are_cast_when_asked_and_refused_else(pool: Pool, backend: str) -> None:
    squad = Squad(pool, backend, 1, 1)
    squad.load(HARD, "tests.sync.wire_cases:wider", seed=0)
    with pytest.raises(MismatchError, match=r"is sent as .*, and the engine holds F64"):
        squad.transfer(1)
    squad.transfer(2, cast=True)
    expected = {
        n: described(n, t.detach().to(target.dtype))
        for (n, t), target in zip(hard_tensors(0).items(), wider(0).values(), strict=True)
    }
    assert squad.digests() == [expected]


def test_counts_of_names(pool: Pool, backend: str) -> None:
    squad = Squad(pool, backend, 1, 1)
    squad.load(HARD, "tests.sync.wire_cases:other_names", seed=0)
    (received,) = squad.transfer(1).received
    report = received.report
    assert (len(report.loaded), report.unknown, len(report.untouched)) == (47, ["odd.1", "odd.2", "odd.3"], 5)


def test_shape_that_differs_is_named_and_the_next_sync_works(pool: Pool, backend: str) -> None:
    squad = Squad(pool, backend, 1, 1)
    squad.load(HARD, "tests.sync.wire_cases:wrong_shape", seed=0)
    with pytest.raises(MismatchError, match=r"large .*\(40, 101\).*\(101, 40\)"):
        squad.transfer(1)
    squad.load(HARD, BLANK, seed=0)
    squad.transfer(2)
    assert_arrived(squad, 0)


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_both_policies_commit_three_syncs(pool: Pool, backend: str, commit: str) -> None:
    managed = Managed(Squad(pool, backend, 1, 2), commit=commit)
    for version in range(3):
        managed.load_version(version)
        report = managed.sync(version)
        assert report.ending is Ending.COMMITTED
        assert sorted(report.committed) == ["rollout 0", "rollout 1"]
        assert report.tensors == len(hard_tensors(0))
        managed.assert_whole()
    assert managed.states() == 3 * [str(state) for state in ORDER[commit]]
