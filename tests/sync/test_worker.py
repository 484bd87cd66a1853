"""Weights through a checkpoint-engine worker into an inference process that outlives it."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.digest import content_digest
from rlctl.sync.errors import GivenUpError, PeerLostError
from rlctl.sync.inlet import LoadOrder, WeightInlet
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.report import SyncError, SyncReport
from rlctl.sync.states import Ending
from rlctl.sync.worker_process import WorkerProcesses
from tests.sync.delta_cases import drifting, larger_blank
from tests.sync.squad import TWO_SIDED, Pool, runnable
from tests.sync.wire_cases import assert_same, hard_tensors
from tests.sync.worker_house import OPTIONS, House, Inference, Model
from tests.waiting import gone


@pytest.fixture(scope="module")
def house(pool: Pool) -> Iterator[House]:
    trainers = MemberProcesses("trainer", pool.take(1, 0)[0], "gloo", OPTIONS)
    workers = WorkerProcesses("gloo", OPTIONS)
    replicas = [Inference("one"), Inference("two")]
    for replica in replicas:
        workers.join(replica.replica, [replica])
    trainers.open(60)
    workers.open(60)
    yield House(trainers, workers, replicas)
    for replica in replicas:
        replica.inlet.close()
    workers.close()


@pytest.mark.parametrize("commit", ["inplace", "staged"])
@pytest.mark.parametrize("backend", TWO_SIDED)
def test_weights_reach_the_inference_process_three_times(house: House, backend: str, commit: str) -> None:
    runnable(backend)
    house.use(backend)
    manager = house.manager(commit=commit)
    for version in range(3):
        sent = house.load_version(version)
        report = manager.sync(version)
        assert report.ending is Ending.COMMITTED
        for replica in house.replicas:
            assert_same(sent, replica.weights)
            assert replica.calls[-1] == f"resume {version}"


def test_a_restarted_replica_catches_up_through_its_worker(house: House) -> None:
    house.use("kimi")
    manager = house.manager(commit="staged")
    sent = house.load_version(7)
    manager.sync(7)
    house.load_version(8)
    first, second = house.replicas
    calls = list(first.calls)
    for tensor in second.weights.values():
        tensor.detach().zero_()
    manager.lost("two", "it was restarted")
    assert manager.catch_up()["two"].ending is Ending.COMMITTED
    assert_same(sent, second.weights)
    assert second.calls[-1] == "resume 7"
    assert first.calls == calls


@pytest.fixture
def drifting_house(house: House) -> Iterator[House]:
    """With weights that change a little from version to version."""
    house.use("gloo", delta=True)
    before = [replica.weights for replica in house.replicas]
    for replica in house.replicas:
        replica.weights = larger_blank(0)
    yield house
    for replica, weights in zip(house.replicas, before, strict=True):
        replica.weights, replica.own_loader, replica.fail = weights, False, False
    house.use("gloo")


def sync_drift(house: House, manager: SyncManager, version: int) -> SyncReport:
    """Bring a version of the drifting weights, and compare every bit."""
    arguments = {"seed": 0, "content": version}
    house.trainers.ask("load", Deadline(60), factory="tests.sync.delta_cases:drifting", arguments=arguments)
    report = manager.sync(version)
    for replica in house.replicas:
        if replica.replica in report.committed:
            assert_same(drifting(0, version), {name: replica.weights[name] for name in drifting(0)})
    return report


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_changes_become_whole_weights_behind_a_worker(drifting_house: House, commit: str) -> None:
    house = drifting_house
    house.replicas[1].own_loader = commit == "staged"  # it gets whole tensors all the same
    manager = house.manager(commit=commit, delta=True)
    sizes = [sync_drift(house, manager, version).bytes for version in range(4)]
    assert max(sizes[1:]) < 0.5 * sizes[0]
    house.workers.open(60)  # as if they had been restarted: a shadow is lost, what the engines hold is not
    size = sync_drift(house, manager, 4).bytes
    assert (size < 0.5 * sizes[0]) == (commit == "inplace")
    assert sync_drift(house, manager, 5).bytes < 0.5 * sizes[0]
    house.replicas[1].fail = True
    assert list(sync_drift(house, manager, 6).fenced) == ["two"]
    house.replicas[1].fail = False
    assert sync_drift(house, manager, 7).ending is Ending.COMMITTED
    assert sync_drift(house, manager, 8).bytes < 0.5 * sizes[0]
    house.replicas[0].weights["big.fp8"].view(torch.int8)[4, 4] ^= 1  # somebody writes to the live weights
    report = sync_drift(house, manager, 9)
    assert report.ending is Ending.COMMITTED
    if commit == "inplace":
        told = [e.detail for e in house.events if e.kind == "retry"][-1]
        assert "the delta of big.fp8 was made against digest" in told
    else:
        assert report.attempts == 1  # changes were made to the shadow
    assert sync_drift(house, manager, 10).bytes < 0.5 * sizes[0]


def test_a_staged_sync_that_fails_is_followed_by_whole_tensors(drifting_house: House) -> None:
    house = drifting_house
    manager = house.manager(commit="staged", delta=True, attempts=1)
    sizes = [sync_drift(house, manager, version).bytes for version in range(2)]
    house.trainers.ask("inject", Deadline(20), fault={"kind": "raise", "at": 53})
    with pytest.raises(SyncError, match="the gather of big") as caught:
        sync_drift(house, manager, 2)
    assert caught.value.report is not None
    assert caught.value.report.kept == ["one", "two"]
    for replica in house.replicas:
        assert_same(drifting(0, 1), {name: replica.weights[name] for name in drifting(0)})
    assert sync_drift(house, manager, 3).bytes >= sizes[0]  # the shadows are a mix
    assert sync_drift(house, manager, 4).bytes < 0.5 * sizes[0]


def test_own_loaders_take_no_changes_in_place_and_are_told_at_once(drifting_house: House) -> None:
    house = drifting_house
    house.replicas[1].own_loader = True
    report = sync_drift(house, house.manager(delta=True), 1)
    assert report.committed == ["one"]
    assert "takes no deltas in place" in report.fenced["two"]


def test_a_stuck_worker_is_killed_and_the_old_version_goes_on(house: House) -> None:
    house.use("gloo")
    manager = house.manager(commit="staged", timeout=2.0, attempts=1)
    before = house.load_version(15)
    manager.sync(15)
    worker = house.workers.members[1]
    worker.ask("inject", {"fault": {"kind": "stall", "at": 1, "seconds": 60.0}}, Deadline(20))
    house.load_version(16)
    begin = time.monotonic()
    with pytest.raises(SyncError, match="worker of two: stage: stuck, killed after") as caught:
        manager.sync(16)
    assert time.monotonic() - begin < 3.0
    assert caught.value.report is not None
    assert caught.value.report.kept == ["one", "two"]
    for replica in house.replicas:
        assert_same(before, replica.weights)
    sent = house.load_version(17)
    assert house.manager(timeout=60.0).sync(17).ending is Ending.COMMITTED
    assert_same(sent, house.replicas[1].weights)


def test_a_failing_load_fences_its_replica_only(house: House) -> None:
    manager = house.manager()
    house.replicas[1].fail = True
    house.load_version(3)
    try:
        report = manager.sync(3)
    finally:
        house.replicas[1].fail = False
    assert list(report.fenced) == ["two"]
    assert "out of memory in layer 3" in report.fenced["two"]
    assert report.committed == ["one"]
    sent = house.load_version(4)
    assert manager.sync(4).ending is Ending.COMMITTED
    assert_same(sent, house.replicas[1].weights)


def test_a_load_that_fails_late_holds_nobody_up(house: House) -> None:
    """By then the worker waits for room in the ring, which nobody reads."""
    manager = house.manager()
    sent = house.load_version(3)
    assert manager.sync(3).ending is Ending.COMMITTED  # the ring is there
    house.replicas[1].fail, house.replicas[1].fail_after = True, 0.5
    sent = house.load_version(4)
    try:
        report = manager.sync(4)
    finally:
        house.replicas[1].fail, house.replicas[1].fail_after = False, 0.0
    assert report.seconds < 10
    assert list(report.fenced) == ["two"]
    assert "out of memory in layer 3" in report.fenced["two"]
    assert report.committed == ["one"]
    assert_same(sent, house.replicas[0].weights)
    sent = house.load_version(5)
    assert manager.sync(5).ending is Ending.COMMITTED
    assert_same(sent, house.replicas[1].weights)


def test_names_are_checked_before_a_staged_commit(house: House) -> None:
    manager = house.manager(commit="staged", attempts=1)
    before = house.load_version(5)
    manager.sync(5)
    spare = torch.zeros(3)
    house.replicas[0].weights["of.another.model"] = spare
    house.load_version(6)
    try:
        with pytest.raises(SyncError, match=r"loaded 50, unknown 0, untouched 1 \(of.another.model\)") as caught:
            manager.sync(6)
    finally:
        del house.replicas[0].weights["of.another.model"]
    assert caught.value.report is not None
    assert caught.value.report.ending is Ending.KEPT
    for replica in house.replicas:
        assert_same(before, replica.weights)
        assert replica.calls[-1] == "resume 5"  # it never stopped


@pytest.mark.new_interpreters
@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_a_killed_worker_comes_back_and_the_inference_process_lives(house: House, commit: str) -> None:
    manager = house.manager(commit=commit, timeout=60.0)
    before = house.load_version(7)
    manager.sync(7)
    worker = house.workers.members[0]
    starts = worker.starts
    os.kill(worker.pid, signal.SIGKILL)
    assert gone(worker.pid, 60.0)
    assert_same(before, house.replicas[0].weights)
    sent = house.load_version(8)
    report = manager.sync(8)
    assert report.ending is Ending.COMMITTED
    assert worker.starts == starts + 1
    assert_same(sent, house.replicas[0].weights)


def test_requests_run_on_while_a_staged_sync_is_transferred(house: House) -> None:
    manager = house.manager(commit="staged")
    house.load_version(9)
    manager.sync(9)
    house.trainers.members[0].ask("inject", {"fault": {"kind": "stall", "at": 1, "seconds": 0.6}}, Deadline(60))
    house.load_version(10)
    marks = [len(r.calls) for r in house.replicas]
    digest = content_digest(house.replicas[0].weights["odd.7"].reshape(-1).view(torch.uint8).numpy())
    thread = threading.Thread(target=lambda: manager.sync(10))
    thread.start()
    time.sleep(0.3)
    assert [len(r.calls) for r in house.replicas] == marks  # nobody was interrupted
    assert content_digest(house.replicas[0].weights["odd.7"].reshape(-1).view(torch.uint8).numpy()) == digest
    thread.join()
    report = [e for e in house.events if e.kind == "ended"][-1]
    assert report.detail == Ending.COMMITTED
    assert report.seconds > 0.6
    assert_same(hard_tensors(0, 10), house.replicas[0].weights)


def test_a_trainer_in_the_managers_process(house: House) -> None:
    model = Model()
    host = SourceHost(model)
    host.open("gloo", "trainer", 0, 1, asdict(OPTIONS))
    trainers, policy = LocalMembers([LocalMember("trainer 0", host)]), SyncPolicy(timeout=20.0)
    manager = SyncManager(trainers, house.workers, house.replicas, engine="gloo", policy=policy)
    for version in (20, 21):
        model.weights = hard_tensors(0, version)
        assert manager.sync(version).ending is Ending.COMMITTED
        assert_same(model.weights, house.replicas[1].weights)
    host.inject({"kind": "flip", "at": 1})
    assert manager.sync(22).attempts == 2
    host.close()


def test_a_stranger_is_refused_by_a_worker(house: House) -> None:
    (folder,) = {Path(house.workers.address(r.replica).removeprefix("unix:")).parent for r in house.replicas}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    stranger = WeightInlet("another run")
    order = LoadOrder(house.workers.address("one"), 1, None, "full", False, False)
    worker = house.workers.members[0]
    listening = call(lambda: worker.ask("receive", {"version": 1, "consumers": 2}, Deadline(20)), "listening")
    with pytest.raises(PeerLostError, match="refused"):
        stranger.into(order, {}, Deadline(5))
    worker.cancel()
    assert isinstance(listening.exception(10), GivenUpError)
