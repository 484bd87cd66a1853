"""A replica whose engine hangs, in a process that lives: it is ended, started again, and serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.experience.events import Noted, ReplicaChanged
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Request, SamplingParams
from tests.runtime.cluster.test_adapters import cluster
from tests.waiting import until

ENGINE = """
import os, time
from rlctl.rollout.embedded.engine import EmbeddedEngine


class Hanging(EmbeddedEngine):
    def step(self):
        if os.path.exists(SWITCH):
            os.unlink(SWITCH)
            time.sleep(600)
        return super().step()
"""


@pytest.fixture
def switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an engine that hangs for good once this file is there."""
    info, switch = tmp_path / "hanging-1.0.dist-info", tmp_path / "switch"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlctl.rollout_engines]\nhanging = hanging_engine:Hanging\n")
    (tmp_path / "hanging_engine.py").write_text(ENGINE.replace("SWITCH", repr(str(switch))))
    monkeypatch.syspath_prepend(tmp_path)
    return switch


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", ["sync", "abort"])
def test_it_is_replaced(tmp_path: Path, switch: Path, call: str) -> None:
    overrides = ["model.lora.rank=0", "model.lora.sync=merged", "rollout.engine=hanging", "sync.timeout=80"]
    with cluster(tmp_path, *overrides) as (group, events):
        group.sync_weights(0)
        request = Request(RequestKey(3, 0), (1, 2, 3), SamplingParams(max_new_tokens=20), seed=5)
        pid = group._replicas.remotes["0"].pid
        switch.touch()
        group.engine.submit([request])
        until(lambda: not switch.exists())
        if call == "sync":
            group.sync_weights(1)  # one that comes back gets the version in the same sync
        else:
            group.engine._at._call_timeout = group.engine._call_timeout = 2.0
            group.engine.abort()
            until(lambda: "restarted" in [e.change for e in events if isinstance(e, ReplicaChanged)])
            group.sync_weights(1)
        assert group.versions() == {"0": 1}
        assert group._replicas.remotes["0"].pid != pid
        other = Request(RequestKey(4, 0), (1, 2, 3), SamplingParams(max_new_tokens=5), seed=5)
        (output,) = group.engine.generate([other], timeout=60)
        assert output.token_ids
        assert [e.message for e in events if isinstance(e, Noted) and "replica 0: " in e.message]
