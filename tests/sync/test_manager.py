"""The manager: who serves what as replicas come, go and are lost; bases of deltas; listeners."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from rlctl.errors import UsageError
from rlctl.sync.deadline import Deadline
from rlctl.sync.report import SyncError, SyncEvent
from rlctl.sync.states import Ending
from tests.sync.drills import recover
from tests.sync.squad import Managed, Pool, Served, Squad
from tests.waiting import gone


def managed(pool: Pool, rollouts: int = 1, **policy: object) -> Managed:
    return Managed(Squad(pool, "gloo", 1, rollouts), **policy)


def test_replicas_join_and_leave_between_syncs(pool: Pool) -> None:
    both = managed(pool, 2)
    late = both.squad.rollouts.members.pop()
    both.served.pop()
    both.manager.remove(late.replica)
    recover(both, 1)
    assert both.manager.versions == {"rollout 0": 1}

    both.squad.rollouts.members.append(late)
    both.served.append(Served(late))
    both.manager.add(both.served[-1])
    assert both.manager.fenced == {"rollout 1": "its weights have not come yet"}
    recover(both, 2)
    assert both.manager.versions == {"rollout 0": 2, "rollout 1": 2}
    assert "resume" in both.served[-1].calls

    gone = both.served.pop(0)
    both.squad.rollouts.members.pop(0)
    both.manager.remove(gone.replica)
    recover(both, 3)
    assert both.manager.versions == {"rollout 1": 3}
    with pytest.raises(UsageError, match="rollout 1 already"):
        both.manager.add(both.served[0])


def test_deltas_have_a_base_only_when_every_replica_serves_it(pool: Pool) -> None:
    one = managed(pool, delta=True)
    recover(one, 1)
    recover(one, 2)
    assert one.manager.sync(3).attempts == 1
    one.manager.lost("rollout 0", "it was restarted")
    assert one.manager.versions == {"rollout 0": None}
    recover(one, 4)
    # Nobody says that it was restarted, but its member does not have the base.
    member = one.squad.rollouts.members[0]
    os.kill(member.pid, signal.SIGKILL)
    assert gone(member.pid, 60.0)
    time.sleep(0.2)
    one.load_version(5)
    report = one.sync(5)
    assert (report.ending, report.attempts) == (Ending.COMMITTED, 1)
    one.assert_whole()


def test_one_sync_at_a_time(pool: Pool) -> None:
    one = managed(pool)
    recover(one, 1)
    one.squad.trainers.members[0].ask("inject", {"fault": {"kind": "stall", "at": 1, "seconds": 0.5}}, Deadline(20))
    thread = threading.Thread(target=one.sync, args=(2,))
    thread.start()
    time.sleep(0.1)
    with pytest.raises(UsageError, match="under way"):
        one.sync(3)
    thread.join()
    assert one.manager.versions == {"rollout 0": 2}


def test_a_listener_that_raises_leaves_no_replica_paused(pool: Pool) -> None:
    one = managed(pool)
    recover(one, 1)

    def broken(event: SyncEvent) -> None:
        raise OSError(f"disk full at {event.state}")

    one.manager._on_event = broken
    one.load_version(2)
    with pytest.raises(OSError, match="disk full at announce"):
        one.sync(2)
    one.assert_whole()
    assert one.served[0].serving == 2


def test_a_trainer_that_fails_before_anything_moved_leaves_the_old_version_serving(pool: Pool) -> None:
    one = managed(pool, timeout=2.0)
    recover(one, 1)
    trainer = one.squad.trainers.members[0]
    busy = threading.Thread(target=lambda: trainer.ask("pause", {"seconds": 3.0}, Deadline(20)))
    busy.start()
    time.sleep(0.1)
    with pytest.raises(SyncError, match="prepare: trainer 0: prepare: still busy") as caught:
        one.sync(2)
    assert caught.value.report is not None
    assert caught.value.report.ending is Ending.KEPT
    assert one.served[0].serving == 1
    one.assert_whole()
    busy.join()
    recover(one, 3)


def test_staged_memory_is_reported(pool: Pool) -> None:
    inplace, staged = managed(pool), managed(pool, commit="staged")
    inplace.load_version(1)
    plain = inplace.sync(1)
    shadowed = staged.sync(2)
    assert plain.extra_nbytes == 2 * 8192
    assert shadowed.extra_nbytes > plain.extra_nbytes + 50_000


def test_a_replica_lost_in_the_swap_is_fenced_and_the_others_serve_the_new_version(pool: Pool) -> None:
    both = managed(pool, 2, commit="staged", timeout=3.0)
    recover(both, 1)
    member = both.squad.rollouts.members[1]

    def stop(event: SyncEvent) -> None:
        if event.state == "release_kv":  # the last before the commit
            os.kill(member.pid, signal.SIGSTOP)

    both.manager._on_event = stop
    both.load_version(2)
    report = both.sync(2)
    both.manager._on_event = both.events.append
    assert report.committed == ["rollout 0"]
    assert "commit: rollout 1: commit: stuck, killed" in report.fenced["rollout 1"]
    both.assert_whole()
    both.wait_for_processes()
    recover(both, 3)
