"""The memory that a sync takes beside the weights, measured in real processes against what is reported and promised."""

from __future__ import annotations

import pytest

from rlctl.sync.deadline import Deadline
from tests.sync.probes import big
from tests.sync.squad import Managed, Pool, Squad, cases, runnable

MODEL = sum(tensor.nbytes for tensor in big(0).values())
BUCKET = 16 << 20
SLACK = 64 << 20


@pytest.fixture(params=cases())
def backend(request: pytest.FixtureRequest) -> str:
    runnable(request.param)
    return request.param


def promised(backend: str, role: str, senders: int) -> int:
    """What a member may hold beside the weights with the policy ``inplace``, without deltas; SLACK comes to it."""
    if backend == "ipc:mapped":  # one generation, which every process that maps it counts
        return 2 * BUCKET + MODEL
    if backend == "kimi":
        return 3 * BUCKET + (MODEL // senders if role == "trainer" else 0)
    return 2 * BUCKET


@pytest.mark.parametrize("more", [False, True], ids=["plain", "staged deltas"])
def test_extra_memory_is_as_promised_and_as_reported(pool: Pool, backend: str, more: bool) -> None:
    """``more``: deltas cost trainers a copy of the last version, the policy ``staged`` costs replicas a shadow."""
    senders = 2 if backend == "kimi" else 1
    squad = Squad(pool, backend, senders, 1, bucket_size=BUCKET, senders=senders, delta=more)
    managed = Managed(squad, commit="staged" if more else "inplace", delta=more)
    squad.load_source("tests.sync.probes:big", seed=1)
    squad.rollouts.ask("load", Deadline(60), factory="tests.sync.probes:big", arguments={"seed": 2})
    members = [*squad.trainers.members, *squad.rollouts.members]
    before = [member.ask("start_probe", {}, Deadline(20)) for member in members]
    reported = 0
    for version in range(3 if more else 2):
        squad.trainers.ask("step", Deadline(20))
        report = managed.sync(version)
        assert report.committed == ["rollout 0"]
        reported = max(reported, report.extra_nbytes)
    peaks = [member.ask("peak", {}, Deadline(20)) for member in members]
    for member, base, peak in zip(members, before, peaks, strict=True):
        role = "trainer" if member in squad.trainers.members else "rollout"
        extra, may = peak - base, promised(backend, role, senders) + (MODEL if more else 0)
        assert extra <= may + SLACK, f"{member.name}: {extra >> 20} MiB, {may >> 20} MiB and some were promised"
        # What a replica maps is reported by the trainer whose it is.
        said = reported + (MODEL if (backend, role) == ("ipc:mapped", "rollout") else 0)
        assert extra <= said + SLACK, f"{member.name}: {extra >> 20} MiB, {said >> 20} MiB were reported"
    (expected, *_), (got,) = squad.trainers.ask("digest", Deadline(20)), squad.digests()
    assert got == expected
