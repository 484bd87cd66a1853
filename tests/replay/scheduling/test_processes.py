"""The schedule of a run in many processes: a replica that is killed, evaluations beside the training, in lockstep and
not."""

import os
import signal
from pathlib import Path

import pytest

from rlctl.config import Layer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, Finished, ReplicaChanged
from rlctl.experience.schedule_events import Asked, Recall, Routed
from rlctl.ops.inputs import find_inputs
from rlctl.ops.resolve import resolve
from rlctl.ops.session import Session
from rlctl.runtime.signals import StopSignal
from tests.replay.scheduling.schedules import changed, places, require_named, statuses, told

STEPS = 6
SMALL = {
    "placement.layout": "separate",
    "placement.replicas": 2,
    "cluster.devices_per_node": 3,
    "sync.backend": "ipc",
    "sync.bucket_size": 16 << 20,
    "sync.timeout": 120.0,
    "trainer.prompts_per_step": 8,
    "trainer.mini_batch_prompts": 4,
    "trainer.parameter_sync_step": 2,
    "rollout.samples_per_prompt": 4,
    "rollout.max_new_tokens": 48,
    "run.threads": 1,
    "run.checkpoint_every": 0,
    "run.validate_prompts": 8,
    "run.validate_every": 2,
    "run.steps": STEPS,
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("same", ["true", "false"])
def test_a_run_whose_replica_dies_is_exact(tmp_path: Path, same: str) -> None:
    (tmp_path / "logs").mkdir()
    events: list[Event] = []
    log = EventLog(None)
    log.subscribe(events.append)
    overrides = ["trainer.mode=separate_async", f"run.deterministic={same}"]
    config = resolve(env={}, layers=[Layer("small", SMALL)], overrides=overrides).config
    output = tmp_path / "logs" / "reward.log"
    with Session(config, find_inputs(config), log, tmp_path / "ckpt", StopSignal(), output=output) as session:
        pids = {name: remote.pid for name, remote in session.parts.rollouts._replicas.remotes.items()}

        def strike(event: Event) -> None:
            if isinstance(event, Finished) and event.ordinal == 17 and "0" in pids:
                os.kill(pids.pop("0"), signal.SIGKILL)

        log.subscribe(strike)
        session.trainer.fit()
    assert places(events, ReplicaChanged, lambda event: event.change == "died")
    assert places(events, Recall), "nothing was under way at the replica that died"
    assert places(events, Asked, lambda event: event.keys[0][0] < 0), "nothing was evaluated"
    assert statuses(told(events, config)) == ["exact"] * STEPS
    for place in places(events, Routed)[::7]:
        other = ["1" if name == "0" else "0" for name in events[place].replicas]
        require_named(told(changed(events, place, replicas=other), config), events[place].seq)
