"""A trainer in the test's process, vLLM as a replica in a process of its own, and workers that bring it weights."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from rlctl.experience.segments import RequestKey, Segment
from rlctl.process import run_token, start
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.rollout.remote.replica import RemoteReplica
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.worker_process import WorkerProcesses
from tests.rollout.vllm.tiny_engines import PROMPT, TinyModel
from tests.waiting import until

STALE_PLUGIN = """
import os

def register():
    from vllm.v1.core.sched.scheduler import Scheduler

    reset = Scheduler.reset_prefix_cache

    def maybe(self, *args, **kwargs):
        return True if os.path.exists(SWITCH) else reset(self, *args, **kwargs)

    Scheduler.reset_prefix_cache = maybe
"""


@contextmanager
def stale_plugin(folder: Path) -> Iterator[Path]:
    """Have vLLM find a plugin that, while the file exists whose path this yields, keeps the prefix cache."""
    info, switch = folder / "stale-0.dist-info", folder / "switch"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stale\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nstale = rlctl_test_stale:register\n")
    (folder / "rlctl_test_stale.py").write_text(STALE_PLUGIN.replace("SWITCH", repr(str(switch))))
    sys.path.append(str(folder))
    try:
        yield switch
    finally:
        sys.path.remove(str(folder))


class ServedHouse:
    """See above.

    Args:
        folder: an empty one.
        setup: of the replica.
    """

    def __init__(self, folder: Path, **setup: Any) -> None:
        self.model = TinyModel()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model.model.save_pretrained(folder / "model")
        self.log = folder / "replica.log"
        given = {"max_slots": 8, "max_length": 512, "replica": "one", "dtype": "float32", "threads": 1, **setup}
        self.replica = RemoteReplica(
            ReplicaSetup(
                engine="vllm", source=str(folder / "model"), token=run_token(), progress_ticks=1, **given
            ),
            start,
            output=self.log,
        )  # fmt: skip
        self.replica.begin(Deadline(300))
        self.ended: dict[RequestKey, Output] = {}
        self.losses: list[str] = []
        self._heard = threading.Condition()
        self.replica.listen(self._hear, lambda _, reason: self.losses.append(reason))
        self.options = EngineOptions(bucket_size=64 << 10, timeout=60.0, token=run_token())
        self.host = SourceHost(self.model)
        self.backend = ""
        self.workers: WorkerProcesses | None = None
        self.use("ipc")
        self.version = 0
        self._ordinals = itertools.count()

    def use(self, backend: str) -> None:
        """Have weights come through another checkpoint engine."""
        if backend == self.backend:
            return
        if self.workers is not None:
            self.workers.close()
        self.backend = backend
        self.host.open(backend, "trainer", 0, 1, asdict(self.options))
        self.workers = WorkerProcesses(backend, self.options)
        self.workers.join(self.replica.replica, self.replica.loaders)
        self.workers.open(90)

    def sync(self, **policy: Any) -> int:
        """Make other weights and have them served; return their version."""
        self.version += 1
        self.model.become(self.version)
        assert self.workers is not None
        trainers = LocalMembers([LocalMember("trainer 0", self.host)])
        policy = {"timeout": 60.0, **policy}
        manager = SyncManager(trainers, self.workers, [self.replica], engine=self.backend, policy=SyncPolicy(**policy))
        manager.sync(self.version)
        return self.version

    def request(
        self,
        tokens: int = 8,
        prompt: Sequence[int] = PROMPT,
        prefix: Sequence[Segment] = (),
        key: RequestKey | None = None,
        **params: Any,
    ) -> Request:
        """Return a request with a key of its own."""
        key = RequestKey(next(self._ordinals), 0) if key is None else key
        return Request(key, tuple(prompt), SamplingParams(tokens, **params), seed=7, prefix=tuple(prefix))

    def outputs(self, *requests: Request) -> list[Output]:
        """Return the outputs of requests, in their order, as they come."""
        until(lambda: all(request.key in self.ended for request in requests), f"outputs of {len(requests)}")
        return [self.ended.pop(request.key) for request in requests]

    def ask(self, *requests: Request) -> list[Output]:
        """Submit requests and return their outputs, in their order."""
        self.replica.submit(requests)
        return self.outputs(*requests)

    def gap(self, request: Request, output: Output, model: TinyModel | None = None) -> torch.Tensor:
        """Return how far the log-prob [tokens] of each token is from a model's at the request's temperature."""
        due = (model or self.model).logprobs(
            list(request.prompt_ids), output.token_ids, temperature=request.params.temperature or 1.0
        )
        return (torch.tensor(output.logprobs) - due).abs()

    def assert_serves(self) -> None:
        """Hold the log-probs of a few tokens against the trainer's."""
        request = self.request(8)
        (output,) = self.ask(request)
        assert {segment.version for segment in output.segments} == {self.version}
        assert self.gap(request, output).max() < 1e-5

    def wait_for_tokens(self, *requests: Request) -> None:
        """Return once it is known that each of these requests has made tokens."""
        keys = {request.key for request in requests}
        until(lambda: keys <= {r.key for r in self.replica.unfinished() if r.prefix}, "tokens")

    @contextmanager
    def stale_cache(self, switch: Path) -> Iterator[None]:
        """Have vLLM keep its prefix cache over updates."""
        switch.touch()
        try:
            yield
        finally:
            switch.unlink()

    def engine_pids(self) -> list[int]:
        """Return the processes that the replica's process started, and theirs."""
        return [
            process.pid for process in psutil.Process(self.replica.pid).children(recursive=True)
            if "resource_tracker" not in " ".join(process.cmdline())
        ]  # fmt: skip

    def close(self) -> None:
        """End all of it."""
        if self.workers is not None:
            self.workers.close()
        self.host.close()
        self.replica.close()

    def _hear(self, replica: str, outputs: list[Output]) -> None:
        with self._heard:
            self.ended |= {output.key: output for output in outputs}
