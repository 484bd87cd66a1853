"""A replica over a server that speaks as SGLang's, and who syncs its weights."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from rlctl.experience.segments import RequestKey
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.shapes import tensor_shapes
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.rollout.serving import make_served
from rlctl.rollout.sglang.served import SglangServed
from rlctl.sync.engine import EngineOptions
from rlctl.sync.local import LocalMember, LocalMembers, SourceHost
from rlctl.sync.manager import SyncManager
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.worker_process import WorkerProcesses
from tests.rollout.sglang.server import Model, http_server, mark_of, next_token

TOKEN = "sglang"  # noqa: S105


OPTIONS = EngineOptions(bucket_size=16 << 10, timeout=30.0, token=TOKEN)


CONFIG = LlamaConfig(
    vocab_size=67,
    hidden_size=16,
    num_hidden_layers=1,
    intermediate_size=24,
    num_attention_heads=2,
    tie_word_embeddings=True,
)


LONG = 150


def make_weights(seed: int, names: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in names.items()}


class Trainer:
    """Weights that change."""

    def __init__(self, names: dict[str, tuple[int, ...]]) -> None:
        self.names, self.left_out, self.all = names, "", {}

    def become(self, version: int) -> int:
        self.weights = self.all[version] = make_weights(version, self.names)
        return version

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in self.weights.items() if name != self.left_out)

    def offload(self) -> None:
        raise AssertionError("nothing is colocated here")


class House:
    """A trainer, a worker, a server, and its replica."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"]}))
        self.source = folder
        names = tensor_shapes(ModelSpec.from_folder(folder))
        self.trainer = Trainer(names)
        self.host = SourceHost(self.trainer)
        self.host.open("gloo", "trainer", 0, 1, asdict(OPTIONS))
        self.model = Model(names, key="secret")
        self.http = http_server(self.model)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        served = make_served(self.setup(url=self.url, key="secret"))
        assert isinstance(served, SglangServed)
        self.served = served
        self.workers = WorkerProcesses("gloo", OPTIONS)
        self.workers.join("one", self.served.loaders)
        self.workers.open(240)

    def setup(self, adapter: dict[str, Any] | None = None, **options: Any) -> ReplicaSetup:
        return ReplicaSetup(
            engine="sglang",
            source=str(self.source),
            dtype="bfloat16",
            max_slots=4,
            max_length=256,
            replica="one",
            token=TOKEN,
            adapter=adapter,
            options=options,
        )

    def manager(self, **policy: Any) -> SyncManager:
        trainers = LocalMembers([LocalMember("trainer 0", self.host)])
        policy = {"timeout": 30.0, **policy}
        return SyncManager(trainers, self.workers, [self.served], engine="gloo", policy=SyncPolicy(**policy))

    def outputs(self, count: int) -> list[Output]:
        found: list[Output] = []
        limit = time.monotonic() + 30
        while len(found) < count:
            assert time.monotonic() < limit
            found += self.served.step(timeout=0.5)
        return found

    def await_tokens(self, requests: int) -> None:
        """Wait until so many requests run and have made the five tokens that they make until ``go_on``."""
        with self.model.changed:
            assert self.model.at_most == 5
            begun = self.model.changed.wait_for(
                lambda: sum(len(one.made) == 5 for one in self.model.running) >= requests, 30
            )
        assert begun

    def go_on(self) -> None:
        with self.model.changed:
            self.model.at_most = None

    def assert_true(self, output: Output, request: Request) -> None:
        """Each token is the one that the weights of its segment's version make after those before it."""
        ids = list(request.prompt_ids)
        for segment in output.segments:
            mark = mark_of(self.trainer.all[segment.version])
            assert segment.replica == "one"
            for token, logprob in zip(segment.token_ids, segment.logprobs, strict=True):
                assert (token, logprob) == next_token(ids, mark)
                ids.append(token)

    def close(self) -> None:
        self.workers.close()
        self.host.close()
        self.served.close()
        self.model.over = True
        self.http.shutdown()
        self.http.server_close()


def request(ordinal: int, tokens: int, **more: Any) -> Request:
    draw = random.Random(ordinal)
    prompt = tuple(draw.randrange(60) for _ in range(9))
    return Request(RequestKey(ordinal, 0), prompt, SamplingParams(max_new_tokens=tokens, **more), seed=7)
