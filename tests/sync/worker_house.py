"""Trainers, checkpoint-engine workers and inference processes that happen to be this one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.inlet import LoadOrder, WeightInlet
from rlctl.sync.manager import SyncManager
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.protocols import LoadReport
from rlctl.sync.report import SyncEvent
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.sync.worker_process import WorkerProcesses
from tests.sync.wire_cases import blank, hard_tensors

OPTIONS = EngineOptions(bucket_size=8192, timeout=20.0, token="worker")  # noqa: S106


@dataclass
class Inference:
    """An inference process that happens to be this one: live weights, an inlet, and a wish to fail."""

    replica: str
    weights: dict[str, torch.Tensor] = field(default_factory=lambda: blank(0))
    inlet: WeightInlet = field(default_factory=lambda: WeightInlet(OPTIONS.token))
    calls: list[str] = field(default_factory=list)
    fail: bool = False
    fail_after: float = 0.0
    own_loader: bool = False

    def targets(self) -> Mapping[str, TensorMeta]:
        return {name: TensorMeta.of(name, tensor) for name, tensor in self.weights.items()}

    def load(self, order: LoadOrder, deadline: Deadline) -> LoadReport:
        if self.fail:
            time.sleep(self.fail_after)
            raise RuntimeError("out of memory in layer 3")
        if self.own_loader:
            names = list[str]()
            for name, tensor in self.inlet.stream(order, deadline):
                self.weights[name].detach().copy_(tensor)
                names.append(name)
            return LoadReport(names, [], [name for name in self.weights if name not in names])
        return self.inlet.into(order, self.weights, deadline)

    def interrupt(self, how: str, version: int, deadline: Deadline) -> None:
        self.calls.append("interrupt")

    def release_kv(self, deadline: Deadline) -> None:
        self.calls.append("release_kv")

    def restore_kv(self, deadline: Deadline) -> None:
        self.calls.append("restore_kv")

    def resume(self, version: int, deadline: Deadline) -> None:
        self.calls.append(f"resume {version}")

    def fence(self, reason: str) -> None:
        self.calls.append("fence")


@dataclass
class House:
    """A trainer, two workers, and two inference processes behind them."""

    trainers: MemberProcesses
    workers: WorkerProcesses
    replicas: list[Inference]
    backend: str = "gloo"
    events: list[SyncEvent] = field(default_factory=list)

    def use(self, backend: str, *, delta: bool = False) -> None:
        """Have every member make its engine anew."""
        self.backend = self.trainers._backend = self.workers._backend = backend
        self.trainers._options = self.workers._options = replace(OPTIONS, delta=delta)
        self.trainers.open(60)
        self.workers.open(60)

    def manager(self, **policy: object) -> SyncManager:
        return SyncManager(
            self.trainers,
            self.workers,
            self.replicas,
            engine=self.backend,
            policy=SyncPolicy(**{"timeout": 20.0, **policy}),  # type: ignore[arg-type]
            on_event=self.events.append,
        )

    def load_version(self, version: int) -> dict[str, torch.Tensor]:
        arguments = {"seed": 0, "content": version}
        self.trainers.ask("load", Deadline(60), factory="tests.sync.wire_cases:hard_tensors", arguments=arguments)
        return hard_tensors(0, version)


class Model:
    """A trainer's model: weights that change in place."""

    def __init__(self) -> None:
        self.weights = hard_tensors(0, 0)

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    def offload(self) -> None:
        raise AssertionError("nothing is colocated here")
