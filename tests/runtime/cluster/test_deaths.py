"""Processes of a run that are killed: training goes on with what is left and what comes back, or ends by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlctl.config import Layer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, Finished, ReplicaChanged, Selected, SyncEnded, SyncPhase
from rlctl.ops.inputs import find_inputs
from rlctl.ops.resolve import resolve
from rlctl.ops.session import Session
from rlctl.runtime.cluster.group import ClusterGroup
from rlctl.runtime.ranks.supervisor import RankError
from rlctl.runtime.signals import StopSignal
from rlctl.sync.report import SyncReport
from tests.waiting import until

SMALL = {
    "placement.layout": "separate",
    "placement.replicas": 2,
    "cluster.devices_per_node": 3,
    "sync.backend": "ipc",
    "sync.bucket_size": 16 << 20,
    "sync.timeout": 120.0,
    "trainer.prompts_per_step": 8,
    "trainer.mini_batch_prompts": 8,
    "rollout.samples_per_prompt": 4,
    "rollout.max_new_tokens": 48,
    "run.validate_prompts": 0,
    "run.threads": 1,
    "run.checkpoint_every": 0,
}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_killed_in_generation_and_in_a_sync_come_back_and_a_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    events: list[Event] = []
    log = EventLog(None)
    log.subscribe(events.append)
    resolution = resolve(env={}, layers=[Layer("small", SMALL)], overrides=["run.steps=9"])
    config = resolution.config
    with Session(
        config, find_inputs(config), log, tmp_path / "ckpt", StopSignal(), output=tmp_path / "logs" / "reward.log"
    ) as session:
        group = session.parts.rollouts
        assert isinstance(group, ClusterGroup)
        pids = {name: remote.pid for name, remote in group._replicas.remotes.items()}
        victims = {"generation": "0", "sync": "1"}

        def changes(name: str) -> list[str]:
            return [e.change for e in events if isinstance(e, ReplicaChanged) and e.replica == name]

        def strike(event: Event) -> None:
            if isinstance(event, Finished) and event.ordinal == 17 and "generation" in victims:
                kill(pids[victims.pop("generation")])
            if isinstance(event, SyncPhase) and event.version == 5 and event.phase == "connect" and "sync" in victims:
                kill(pids[victims.pop("sync")])
            if isinstance(event, Selected) and event.step == 9:
                kill(group.model.ranks.pids[0])

        sync = group.sync_weights

        def sync_weights(version: int) -> SyncReport:
            if version == 7:
                until(lambda: "restarted" in changes("0") and "restarted" in changes("1"))
            return sync(version)

        group.sync_weights = sync_weights  # type: ignore[method-assign]
        log.subscribe(strike)
        with pytest.raises(RankError, match=r"trainer rank 0 of 1 died in \w+: SIGKILL"):
            session.trainer.fit()
        assert not victims
    for name in ("0", "1"):
        assert changes(name) == ["joined", "died", "restarted", "joined"]
    rejoined = [e.version for e in events if isinstance(e, ReplicaChanged) and e.change == "joined"][2:]
    assert all(3 <= version <= 7 for version in rejoined), rejoined
    # Every prompt was trained once, whatever died.
    trained = [ordinal for e in events if isinstance(e, Selected) for ordinal in e.ordinals]
    assert trained == list(range(9 * 8))
    assert {e.version for e in events if isinstance(e, SyncEnded) and e.status != "failed"} == set(range(9))
    found = {path.name for path in (tmp_path / "logs").iterdir()}
    assert {"trainer_rank_0.log", "replica_0.log", "replica_1.log", "worker_0.log", "worker_1.log"} <= found
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()))
