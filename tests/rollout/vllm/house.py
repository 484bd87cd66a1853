"""All that a sync into vLLM needs, in small."""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rlctl.process import run_token
from rlctl.rollout.vllm.handles import LLMHandle
from rlctl.rollout.vllm.replica import VllmReplica
from rlctl.sync.engine import EngineOptions
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.member import described
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.worker_process import WorkerProcesses
from tests.rollout.vllm.tiny_engines import PROMPT, TinyModel, end_engine, engine_arguments, say


class House:
    """A trainer in this process, a checkpoint-engine worker, and a vLLM engine in this process behind it."""

    def __init__(self, folder: Path, model: TinyModel, **engine: Any) -> None:
        import vllm

        self.model = model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model.model.save_pretrained(folder)
        self.llm = vllm.LLM(**engine_arguments(folder, **engine))
        self.handle = LLMHandle(self.llm)
        self.replica = VllmReplica(self.handle, "one")
        self.options = EngineOptions(bucket_size=64 << 10, timeout=60.0, token=run_token())
        self.host = SourceHost(self.model)
        self.workers = WorkerProcesses("gloo", self.options)
        self.workers.join("one", self.replica.loaders)
        self.opened = "", self.options
        self.version = 0

    def manager(self, backend: str, *, delta: bool = False, **policy: Any) -> SyncManager:
        options = replace(self.options, delta=delta)
        if (backend, options) != self.opened:
            self.host.open(backend, "trainer", 0, 1, asdict(options))
            self.workers._backend, self.workers._options = backend, options
            self.workers.open(60)
            self.opened = backend, options
        trainers = LocalMembers([LocalMember("trainer 0", self.host)])
        policy = {"timeout": 60.0, "delta": delta, **policy}
        return SyncManager(trainers, self.workers, [self.replica], engine=backend, policy=SyncPolicy(**policy))

    def change(self) -> int:
        self.version += 1
        self.model.become(self.version)
        return self.version

    def close(self) -> None:
        self.workers.close()
        self.host.close()
        end_engine(self.llm)

    def assert_serves_the_model(self, *, readable: bool = True) -> None:
        with self.handle.batch(timeout=10) as llm:
            tokens, logprobs, cached = say(llm)
            assert cached == 0
            torch.testing.assert_close(logprobs, self.model.logprobs(PROMPT, tokens), atol=1e-5, rtol=0)
            again, logprobs, cached = say(llm)
        assert (again, cached) == (tokens, 128)  # it is in the cache now, to be stale after the next update
        torch.testing.assert_close(logprobs, self.model.logprobs(PROMPT, tokens), atol=1e-5, rtol=0)
        if readable:
            assert self.replica.digests() == [{n: described(n, t) for n, t in self.model.tensors().items()}]
