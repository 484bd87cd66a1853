"""Adapters alone to replicas in processes of their own: what travels, who lacks the base, one that is scaled twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from rlctl.config import Layer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, ReplicaChanged
from rlctl.ops.inputs import find_inputs
from rlctl.ops.resolve import resolve
from rlctl.rollout.registry import ROLLOUT_ENGINES
from rlctl.runtime.cluster.group import ClusterGroup
from rlctl.runtime.models import load_models
from rlctl.sync.report import SyncError
from tests.model.tiny import LOSS, random_rows
from tests.waiting import until

ENGINE = """
from rlctl.rollout.embedded.engine import EmbeddedEngine


class Twice(EmbeddedEngine):
    base = None

    def load_weights(self, stream, version):
        if self.base is None:
            self.base = {}
            stream = ((name, self.base.setdefault(name, tensor.clone())) for name, tensor in stream)
        elif version == 2:
            stream = ((name, 2 * tensor - self.base[name]) for name, tensor in stream)
        return super().load_weights(stream, version)
"""
SMALL = {
    "placement.layout": "separate",
    "placement.replicas": 1,
    "cluster.devices_per_node": 2,
    "sync.backend": "ipc",
    "sync.bucket_size": 1 << 20,
    "model.lora.rank": 4,
    "model.lora.sync": "adapter",
    "rollout.engine": "twice",
    "run.threads": 1,
}


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install an engine that adds the adapter of version 2 two times."""
    info = tmp_path / "twice-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twice\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlctl.rollout_engines]\ntwice = twice_engine:Twice\n")
    (tmp_path / "twice_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    # What an earlier test of this process found stays as it was: the table looks for packages once.
    monkeypatch.setattr(ROLLOUT_ENGINES, "_foreign", None)
    monkeypatch.setattr(ROLLOUT_ENGINES, "_registered", {})


@contextmanager
def cluster(logs: Path, *overrides: str) -> Iterator[tuple[ClusterGroup, list[Event]]]:
    config = resolve(env={}, layers=[Layer("small", SMALL)], overrides=list(overrides)).config
    loaded = load_models(config, find_inputs(config)).actor
    events: list[Event] = []
    log = EventLog(None)
    log.subscribe(events.append)
    with ExitStack() as stack:
        yield ClusterGroup(config, loaded, log, total_updates=9, logs=logs, stack=stack), events


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_scaled_twice_is_caught_and_one_that_is_started_again_gets_its_base(tmp_path, twice, dtype):
    torch.manual_seed(5)
    with cluster(tmp_path, f"model.dtype={dtype}", "trainer.optimizer.lr=1e-2") as (group, events):
        whole = group.sync_weights(0)
        group.model.update(random_rows(), LOSS)
        alone = group.sync_weights(1)
        assert alone.tensors < whole.tensors
        assert alone.bytes < whole.bytes / 5
        with pytest.raises(SyncError, match="otherwise than the trainer" if dtype == "float32" else "the sum of base"):
            group.sync_weights(2)
        assert group.versions() == {"0": None}
        assert group.sync_weights(3).tensors == whole.tensors  # what it holds was not known
        group.model.update(random_rows(), LOSS)
        assert group.sync_weights(4).tensors == alone.tensors
        os.kill(group._replicas.remotes["0"].pid, signal.SIGKILL)
        until(lambda: "restarted" in [e.change for e in events if isinstance(e, ReplicaChanged)])
        group.model.update(random_rows(), LOSS)
        group.sync_weights(5)
        assert group.sync_weights(6).tensors == alone.tensors
        assert group.versions() == {"0": 6}
