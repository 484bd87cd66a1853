"""A run whose trainer ranks generate by vLLM."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, SyncEnded
from rlctl.experience.segments import RequestKey
from rlctl.ops.inputs import find_inputs
from rlctl.ops.session import Session
from rlctl.rollout.base import Request, SamplingParams
from rlctl.runtime.hybrid.group import HybridGroup
from rlctl.runtime.signals import StopSignal
from tests.runtime.hybrid.test_runs import configured, on_paper


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_run_syncs_what_the_plan_says_and_generates_what_is_trained(tmp_path: Path) -> None:
    events: list[Event] = []
    log = EventLog(None)
    log.subscribe(events.append)
    config = configured("rollout.engine=vllm", "rollout.max_new_tokens=8")
    with Session(config, find_inputs(config), log, tmp_path / "ckpt", StopSignal(), output=tmp_path / "log") as session:
        group = session.parts.rollouts
        assert isinstance(group, HybridGroup)
        session.trainer.fit()
        ended = [event for event in events if isinstance(event, SyncEnded)]
        assert [(e.version, e.status) for e in ended] == [(version, "committed") for version in range(3)]
        assert {e.bytes for e in ended} == {on_paper(config)}
        params = SamplingParams(max_new_tokens=8, temperature=0.0)
        requests = [Request(RequestKey(900 + n, 0), (1 + n, 2, 3), params, seed=7) for n in range(4)]
        found = group.engine.generate(requests)
        group.engine.submit(requests)
        group.engine.step()
        group.engine.abort()
        parts = group.engine.step()
        assert [o.finish_reason for o in parts] == ["abort"] * 4 and group.engine.num_running == 0
        for whole, part in zip(found, parts, strict=True):
            assert part.token_ids == whole.token_ids[:4] and whole.finish_reason == "length"
        os.kill(group.model.ranks.pids[1], signal.SIGKILL)
        with pytest.raises(Exception, match="trainer rank 1 of 2 died in decode: SIGKILL"):
            group.engine.generate([Request(RequestKey(990, 0), (1, 2, 3), params, seed=7)])
