"""Real processes that sync weights, kept for a whole test module: importing torch costs more than any test."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from rlctl.errors import UnavailableError
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, TransferStats
from rlctl.sync.member import Received
from rlctl.sync.member_process import MemberProcess, MemberProcesses
from rlctl.sync.registry import CHECKPOINT_ENGINES

MEMBER = "rlctl.sync.member:serve"


def runnable(backend: str) -> None:
    """Skip, with the backend's own reason, what this machine cannot run; RLCTL_TEST_REQUIRE makes that a failure."""
    try:
        CHECKPOINT_ENGINES.load(backend).available()
    except UnavailableError as error:
        if backend in os.environ.get("RLCTL_TEST_REQUIRE", "").split(","):
            raise
        pytest.skip(str(error))


def weights_of(factory: str, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What a member makes of the same ``load``."""
    module, _, attribute = factory.partition(":")
    return getattr(importlib.import_module(module), attribute)(**arguments)


@dataclass
class Outcome:
    sent: list[TransferStats]
    received: list[Received]


class Pool:
    """Processes to be made members of, again and again."""

    def __init__(self) -> None:
        self.trainers: list[MemberProcess] = []
        self.rollouts: list[MemberProcess] = []

    def take(self, trainers: int, rollouts: int) -> tuple[list[MemberProcess], list[MemberProcess]]:
        while len(self.trainers) < trainers:
            self.trainers.append(MemberProcess(f"trainer {len(self.trainers)}", MEMBER, restart=True))
        while len(self.rollouts) < rollouts:
            self.rollouts.append(
                MemberProcess(name := f"rollout {len(self.rollouts)}", MEMBER, replica=name, restart=True)
            )
        return self.trainers[:trainers], self.rollouts[:rollouts]

    def close(self) -> None:
        for member in [*self.trainers, *self.rollouts]:
            member.close()


class Squad:
    """Trainers and rollout workers of one backend, synced without a manager: the bare contract of an engine."""

    def __init__(self, pool: Pool, backend: str, trainers: int, rollouts: int, **options: Any) -> None:
        self.backend = backend
        self.engine = CHECKPOINT_ENGINES.load(backend)
        self.options = EngineOptions(**{"bucket_size": 8192, "timeout": 20.0, "token": "contract", **options})
        t, r = pool.take(trainers, rollouts)
        self.trainers = MemberProcesses("trainer", t, backend, self.options)
        self.rollouts = MemberProcesses("rollout", r, backend, self.options)
        self.open()

    def open(self) -> None:
        self.trainers.open(60)
        self.rollouts.open(60)

    def load(self, source: str, targets: str, **arguments: Any) -> None:
        deadline = Deadline(30)
        self.trainers.ask("load", deadline, factory=source, arguments=arguments)
        self.rollouts.ask("load", deadline, factory=targets, arguments=arguments)

    @contextmanager
    def connected(self) -> Iterator[Deadline]:
        """Everything of a sync but the transfer."""
        deadline = Deadline(self.options.timeout)
        sides = (self.trainers, self.rollouts)
        try:
            metadata = []
            for side in sides:
                world = len(side.members)
                seats = {r: {"timeout": deadline.seconds, "rank": r, "world": world} for r in range(world)}
                metadata += [f.result() for f in side.start("prepare", seats, deadline).values()]
            trainers = len(self.trainers.members)
            kwargs = self.engine.build_topology(trainers, len(self.rollouts.members), metadata)
            calls = [
                *self.trainers.start("init_process_group", dict(enumerate(kwargs[:trainers])), deadline).values(),
                *self.rollouts.start("init_process_group", dict(enumerate(kwargs[trainers:])), deadline).values(),
            ]
            for future in calls:
                future.result()
            yield deadline
        finally:
            for side in sides:
                side.ask("finalize", Deadline(5), committed=None)

    def transfer(self, version: int, *, receive: str = "receive", **arguments: Any) -> Outcome:
        """One sync. Raises what the first member to fail raises."""
        with self.connected() as deadline:
            sending = self._start(self.trainers, "send", deadline, version=version)
            receiving = self._start(self.rollouts, receive, deadline, version=version, **arguments)
            received = [msgspec.convert(f.result(), Received) for f in receiving]
            sent = [msgspec.convert(f.result(), TransferStats) for f in sending]
        return Outcome(sent, received)

    def _start(self, side: MemberProcesses, command: str, deadline: Deadline, **arguments: Any) -> list[Future[Any]]:
        return list(side.start(command, dict.fromkeys(range(len(side.members)), arguments), deadline).values())

    def digests(self) -> list[dict[str, Any]]:
        """Of every rollout worker."""
        return self.rollouts.ask("digest", Deadline(10))
