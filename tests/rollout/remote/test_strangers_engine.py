"""A rollout engine of another package, found by its entry point, serves behind the pool from processes of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.rollout.pool import ReplicaPool
from rlctl.sync.deadline import Deadline
from tests.rollout.remote.house import begun, setup_of
from tests.waiting import until

ENGINE = '''
"""Counts on from the last token of the prompt, one number a step."""

import time

from rlctl.rollout.base import LoadReport, Output, RolloutEngine
from rlctl.experience.segments import Segment


class Counting(RolloutEngine):
    def __init__(self, model, *, dtype, max_slots=64, max_length=2048, replica="0", device="cpu",
                 trust_remote_code=False, by=1):
        self.replica, self.by, self.running, self.made = replica, by, {}, {}

    version = 0
    num_running = property(lambda self: len(self.running))

    def submit(self, requests):
        for request in requests:
            self.running[request.key] = request
            self.made[request.key] = [token for segment in request.prefix for token in segment.token_ids]

    def step(self):
        time.sleep(0.005)
        for key, request in self.running.items():
            self.made[key].append(request.prompt_ids[-1] + self.by * (len(self.made[key]) + 1))
        full = [key for key, request in self.running.items() if len(self.made[key]) >= request.params.max_new_tokens]
        return [self.end(key, "length") for key in full]

    def end(self, key, reason):
        request, made = self.running.pop(key), self.made.pop(key)
        new = made[sum(len(segment.token_ids) for segment in request.prefix):]
        segments = [*request.prefix, *([Segment(new, [0.0] * len(new), 0, self.replica)] if new else [])]
        return Output(key, segments, reason)

    def abort(self, keys=None):
        return [self.end(key, "abort") for key in list(self.running if keys is None else keys) if key in self.running]

    def generate(self, requests):
        raise NotImplementedError

    def load_weights(self, stream, version):
        return LoadReport([], [], [])

    def weights(self):
        return {}

    def digests(self, names=None):
        return {}

    def sleep(self, level=1):
        pass

    def wake(self, tags=()):
        pass

    def close(self):
        pass
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package beside rlctl, as pip leaves it."""
    site = tmp_path / "site"
    info = site / "strangers_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "strangers_engine.py").write_text(ENGINE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlctl.rollout_engines]\ncounting = strangers_engine:Counting\n")
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.usefixtures("package")
def test_an_engine_of_another_package_serves(tmp_path: Path) -> None:
    requests = [
        Request(RequestKey(ordinal, 0), (7, ordinal), SamplingParams(max_new_tokens=40 + ordinal), seed=0)
        for ordinal in range(10)
    ]
    setups = [setup_of(tmp_path / "model", name, engine="counting", options={"by": 2}) for name in ("a", "b")]
    replicas = begun(setups)
    pool = ReplicaPool(replicas)
    try:
        with pool.syncing():
            for replica in replicas:
                replica.resume(0, Deadline(60))
        pool.submit(requests)
        assert pool.stats().requests == {"a": 5, "b": 5}
        os.kill(replicas[0].pid, signal.SIGKILL)
        outputs: list[Output] = []

        def all_ended() -> bool:
            outputs.extend(pool.step(0.5))
            return not pool.num_running

        until(all_ended, "all responses")
        assert pool.stats().resubmitted == 5
    finally:
        for replica in replicas:
            replica.close()
    assert sorted(output.key.ordinal for output in outputs) == list(range(10))
    for output in outputs:
        ordinal = output.key.ordinal
        assert output.token_ids == [ordinal + 2 * n for n in range(1, 41 + ordinal)]
