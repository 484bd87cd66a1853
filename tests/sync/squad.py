"""Real processes that sync weights, kept for a whole test module: importing torch costs more than any test."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from rlctl.errors import UnavailableError
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, TransferStats
from rlctl.sync.host import Received
from rlctl.sync.manager import SyncManager
from rlctl.sync.member import described
from rlctl.sync.member_process import MemberProcess
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.report import SyncEvent, SyncReport
from rlctl.sync.traits import BACKEND_TRAITS
from tests.conftest import OPTIONAL
from tests.sync.delta_cases import described_drift
from tests.sync.wire_cases import hard_tensors

MEMBER = "tests.sync.probes:serve"


TWO_SIDED = [name for name in CHECKPOINT_ENGINES.names() if not BACKEND_TRAITS[name].in_place]
"""Backends whose trainers and rollout workers are different members."""


def cases() -> list[Any]:
    """Every backend, and those that have several ways in each of them: ``name:way``; marked where a package of its own
    is needed."""
    ways = {name: traits.ways for name, traits in BACKEND_TRAITS.items()}
    return [
        pytest.param(f"{name}:{way}".rstrip(":"), marks=[getattr(pytest.mark, name)] if name in OPTIONAL else [])
        for name in TWO_SIDED
        for way in ways.get(name) or ("",)
    ]


def runnable(case: str) -> None:
    """Skip, with the backend's own reason, what this machine cannot run; RLCTL_TEST_REQUIRE makes that a failure."""
    backend = case.partition(":")[0]
    try:
        CHECKPOINT_ENGINES.load(backend).available()
    except UnavailableError as error:
        if backend in os.environ.get("RLCTL_TEST_REQUIRE", "").split(","):
            raise
        pytest.skip(str(error))


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
            name = f"rollout {len(self.rollouts)}"
            self.rollouts.append(MemberProcess(name, MEMBER, replica=name, holds_weights=True, restart=True))
        return self.trainers[:trainers], self.rollouts[:rollouts]

    def close(self) -> None:
        for member in [*self.trainers, *self.rollouts]:
            member.close()


class Squad:
    """Trainers and rollout workers of one backend, synced without a manager: the bare contract of an engine."""

    def __init__(self, pool: Pool, case: str, trainers: int, rollouts: int, **options: Any) -> None:
        self.backend, _, way = case.partition(":")
        backend = self.backend
        if way:
            options = {"extras": {"way": way}, **options}
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
        self.load_source(source, **arguments)
        self.rollouts.ask("load", Deadline(60), factory=targets, arguments=arguments)

    def load_source(self, source: str, **arguments: Any) -> None:
        self.trainers.ask("load", Deadline(60), factory=source, arguments=arguments)

    def prepare(self, deadline: Deadline) -> list[dict[str, Any]]:
        """The first thing in a sync: all members' metadata."""
        metadata = []
        for side in (self.trainers, self.rollouts):
            world = len(side.members)
            seats = {r: {"timeout": deadline.seconds, "rank": r, "world": world} for r in range(world)}
            metadata += [f.result() for f in side.start("prepare", seats, deadline).values()]
        return metadata

    @contextmanager
    def connected(self) -> Iterator[Deadline]:
        """Everything of a sync but the transfer."""
        deadline = Deadline(self.options.timeout)
        sides = (self.trainers, self.rollouts)
        try:
            metadata = self.prepare(deadline)
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
                side.ask("finalize", Deadline(20), committed=None)

    def transfer(self, version: int, *, in_step: str = "", **arguments: Any) -> Outcome:
        """One sync. Raises what the first member to fail raises. ``in_step``: a file by which the trainer ranks meet
        at every tensor."""
        send = {"command": "send_in_step", "meeting": in_step} if in_step else {"command": "send"}
        with self.connected() as deadline:
            sending = self._start(self.trainers, deadline=deadline, version=version, **send)
            receiving = self._start(self.rollouts, "receive", deadline, version=version, **arguments)
            received = [msgspec.convert(f.result(), Received) for f in receiving]
            sent = [msgspec.convert(f.result(), TransferStats) for f in sending]
        return Outcome(sent, received)

    def _start(self, side: MemberProcesses, command: str, deadline: Deadline, **arguments: Any) -> list[Future[Any]]:
        return list(side.start(command, dict.fromkeys(range(len(side.members)), arguments), deadline).values())

    def digests(self) -> list[dict[str, Any]]:
        """Of every rollout worker."""
        return self.rollouts.ask("digest", Deadline(60))


@dataclass
class Served:
    """A replica whose weights live in a rollout member's process; it notes what it is asked."""

    member: MemberProcess
    calls: list[str] = field(default_factory=list)
    serving: int | None = None
    hang: str = ""
    _hanging: threading.Event = field(default_factory=threading.Event)

    @property
    def replica(self) -> str:
        return self.member.replica

    def interrupt(self, how: str, version: int, deadline: Deadline) -> None:
        self._note("interrupt")
        self.serving = None

    def release_kv(self, deadline: Deadline) -> None:
        self._note("release_kv")

    def restore_kv(self, deadline: Deadline) -> None:
        self._note("restore_kv")

    def resume(self, version: int, deadline: Deadline) -> None:
        self._note("resume")
        self.serving = version

    def fence(self, reason: str) -> None:
        self.calls.append("fence")
        self.serving = None

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.hang == call:
            self._hanging.wait(30)

    def finish(self) -> None:
        """Let a call that hangs return, and wait until it has."""
        self._hanging.set()
        time.sleep(0.1)


class Managed:
    """A squad under a SyncManager. ``drift``: with weights of which little changes from version to version."""

    def __init__(self, squad: Squad, *, drift: bool = False, **policy: Any) -> None:
        self.squad = squad
        self.source = "tests.sync.delta_cases:drifting" if drift else "tests.sync.wire_cases:hard_tensors"
        self.described = described_drift if drift else described_all
        squad.load(
            self.source, "tests.sync.delta_cases:larger_blank" if drift else "tests.sync.wire_cases:blank", seed=0
        )
        self.events: list[SyncEvent] = []
        self.policy = SyncPolicy(**{"timeout": 20.0, **policy})
        self.served = [Served(member) for member in squad.rollouts.members]
        self.manager = SyncManager(
            squad.trainers,
            squad.rollouts,
            self.served,
            engine=squad.backend,
            policy=self.policy,
            on_event=self.events.append,
        )

    def sync(self, version: int) -> SyncReport:
        return self.manager.sync(version)

    def wait_for_processes(self) -> None:
        """Wait until those that were killed are back: starting one may take longer than a test's deadlines."""
        for side in (self.squad.trainers, self.squad.rollouts):
            side.ask("served", Deadline(100))

    def states(self) -> list[str]:
        return [e.state for e in self.events if e.kind == "state"]

    def load_version(self, version: int) -> None:
        """Give the trainers the weights of ``version``."""
        self.squad.load_source(self.source, seed=0, content=version)

    def assert_whole(self) -> None:
        """Every replica that serves holds exactly the weights of the version that it says."""
        for served, digests in zip(self.served, self.squad.digests(), strict=True):
            assert served.serving == self.manager.versions[served.replica], served.replica
            if served.serving is not None:
                assert digests == self.described(0, served.serving), served.replica


def described_all(seed: int, content: int = 0) -> dict[str, Any]:
    """What a member's ``digest`` says when it holds ``hard_tensors(seed, content)``."""
    return {name: described(name, tensor) for name, tensor in hard_tensors(seed, content).items()}
