"""What takes part in a sync bench: real processes that do one repetition when told, and say what it took."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rlctl.errors import RlctlError
from rlctl.ops.sync_bench_member import Usage
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, TransferStats
from rlctl.sync.manager import SyncManager
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.phase_clock import PHASES
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.protocols import Group
from rlctl.sync.report import SyncReport
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.sync.undertaker import Undertaker

TARGET = "rlctl.ops.sync_bench_member:serve"
MAKE = "rlctl.ops.sync_bench_workload:make"
SEED = 0
SETUP_SECONDS = 180.0


@dataclass(frozen=True)
class Sample:
    """One repetition.

    Attributes:
        seconds: wall time of it.
        cpu_by_side: CPU seconds of all trainers, and of all rollout workers.
        bytes_moved: bytes of tensors that left the trainers.
        stall_s: how long a replica did not serve.
        phases: seconds by phase, of the member that took longest for it.
        extra_bytes: growth of the resident memory of the process that grew most, or what its engine says it holds,
            if that is more.
        wrong: tensors, over all receivers, that are not bit for bit the trainer's.
        hash_cpu_s: of the memory copy: CPU seconds that the digests of all tensors would add to it.
    """

    seconds: float
    cpu_by_side: tuple[float, float]
    bytes_moved: int
    stall_s: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    extra_bytes: int | None = None
    wrong: int = 0
    hash_cpu_s: float = 0.0

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes."""
        return sum(self.cpu_by_side)


class Side(Group, Protocol):
    """Members that can be opened and closed: child processes of this host, or of another."""

    def open(self, timeout: float) -> None:
        """Start every process and make every engine."""

    def ask(self, command: str, deadline: Deadline, **arguments: Any) -> list[Any]:
        """Have every member run a command; return the results. Raises the first error."""

    def close(self) -> None:
        """End every process."""


#: Makes the rollout workers: (backend, how many, options).
Workers = Callable[[str, int, EngineOptions], Side]


def workers_here(backend: str, count: int, options: EngineOptions) -> MemberProcesses:
    """Return rollout workers on this host."""
    return MemberProcesses("rollout", count, backend, options, target=TARGET, restart=False)


class Contestant(ABC):
    """Something to be measured."""

    @abstractmethod
    def open(self) -> None:
        """Start what it needs."""

    @abstractmethod
    def rep(self, step: int) -> Sample:
        """Change the weights for ``step``, move them (only this is timed), check them."""

    @abstractmethod
    def close(self) -> None:
        """End what was started."""


@dataclass
class _Idle:
    """A replica without requests: interrupting and resuming it cost nothing."""

    replica: str

    def interrupt(self, how: str, version: int, deadline: Deadline) -> None:
        """See ServedReplica."""

    def release_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""

    def restore_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""

    def resume(self, version: int, deadline: Deadline) -> None:
        """See ServedReplica."""

    def fence(self, reason: str) -> None:
        """See ServedReplica."""


class SyncContestant(Contestant):
    """Whole syncs by a SyncManager through one checkpoint engine, trainers and rollout workers in own processes.

    With ``views`` workers read the weights where they lie, and let them go before the trainers change them.
    """

    def __init__(
        self,
        backend: str,
        tensors: Sequence[TensorMeta],
        trainers: int,
        rollouts: int,
        options: EngineOptions,
        *,
        change: float = 1.0,
        delta: bool = False,
        views: bool = False,
        workers: Workers | None = None,
    ) -> None:
        self.tensors = tensors
        self._change = change
        self._views = views
        self.options = options = replace(options, delta=delta)
        self.trainers = MemberProcesses("trainer", trainers, backend, options, target=TARGET)
        self.rollouts = (workers or workers_here)(backend, rollouts, options)
        self._manager = SyncManager(
            self.trainers,
            self.rollouts,
            [_Idle(member.name) for member in self.rollouts.members],
            engine=backend,
            policy=SyncPolicy(timeout=options.timeout, delta=delta, attempts=1),
        )

    def open(self) -> None:
        """See Contestant."""
        opening = [
            call(partial(self._open, self.trainers, SEED), "open the trainers"),
            call(partial(self._open, self.rollouts, None), "open the rollout workers"),
        ]
        for future in opening:
            future.result()
        self.ask("settle_memory")

    def _open(self, side: Side, seed: int | None) -> None:
        side.open(SETUP_SECONDS)
        arguments = {"tensors": self.tensors, "seed": seed}
        side.ask("load", Deadline(SETUP_SECONDS), factory=MAKE, arguments=arguments)
        if seed is not None:
            side.ask("adopt", Deadline(SETUP_SECONDS))
        elif self._views:
            side.ask("read_views", Deadline(SETUP_SECONDS))

    def rep(self, step: int) -> Sample:
        """See Contestant."""
        self.begin(step)
        report = self._manager.sync(step)
        _require_all(report)
        usages, wrong = self.end()
        stats = [msgspec.convert(s, TransferStats) for s in self.ask("stats")]
        return Sample(
            seconds=report.seconds,
            cpu_by_side=self.by_side(usages),
            bytes_moved=report.bytes,
            stall_s=report.stall,
            phases={phase: max(s.seconds.get(phase, 0.0) for s in stats) for phase in PHASES},
            # Files in memory are nobody's own: those the engine counts.
            extra_bytes=max(max(u.extra_bytes, s.extra_nbytes) for u, s in zip(usages, stats, strict=True)),
            wrong=wrong,
        )

    def begin(self, step: int) -> None:
        """Change the trainers' weights and start to count."""
        if self._views:
            self.rollouts.ask("let_go", Deadline(SETUP_SECONDS))
        self.trainers.ask("mutate", Deadline(SETUP_SECONDS), step=step, change=self._change)
        self.ask("begin")

    def end(self) -> tuple[list[Usage], int]:
        """Return what each process used, and the number of tensors that are wrong."""
        usages = [msgspec.convert(u, Usage) for u in self.ask("usage")]
        right, *others = self.ask("digest")
        return usages, sum(other.get(name) != right[name] for other in others for name in right)

    def by_side(self, usages: Sequence[Usage]) -> tuple[float, float]:
        """Return the CPU seconds of the trainers and of the rollout workers."""
        cut = len(self.trainers.members)
        return sum(u.cpu_s for u in usages[:cut]), sum(u.cpu_s for u in usages[cut:])

    def ask(self, command: str) -> list[Any]:
        """Have every process run a command; trainers first."""
        sides: tuple[Side, Side] = (self.trainers, self.rollouts)
        return [answer for side in sides for answer in side.ask(command, Deadline(SETUP_SECONDS))]

    def close(self) -> None:
        """See Contestant."""
        self.trainers.close()
        self.rollouts.close()


class RawContestant(Contestant):
    """The library of a SyncContestant without rlctl around it, in the same processes: trainer 0 to all."""

    def __init__(self, base: SyncContestant, factory: str) -> None:
        self._base = base
        self._factory = factory
        self._folder = Path(tempfile.mkdtemp(prefix="rlctl-bench-"))
        self._undertaker = Undertaker(self._folder)

    def open(self) -> None:
        """See Contestant. The base is open."""
        meeting = str(self._folder / "meeting")
        world = 1 + len(self._base.rollouts.members)
        arguments = [
            {"factory": self._factory, "rank": rank, "world": world, "meeting": meeting} for rank in range(world)
        ]
        self._both("raw_open", "raw_open", arguments)

    def rep(self, step: int) -> Sample:
        """See Contestant."""
        self._base.begin(step)
        start = time.perf_counter()
        self._both("raw_send", "raw_receive", [{}] * (1 + len(self._base.rollouts.members)))
        seconds = time.perf_counter() - start
        usages, wrong = self._base.end()
        moved = sum(meta.nbytes for meta in self._base.tensors)
        return Sample(seconds, self._base.by_side(usages), moved, wrong=wrong)

    def close(self) -> None:
        """See Contestant. The processes are the base's."""
        self._undertaker.close()

    def _both(self, send: str, receive: str, arguments: list[dict[str, Any]]) -> None:
        deadline = Deadline(self._base.options.timeout)
        futures = [
            *self._base.trainers.start(send, {0: arguments[0]}, deadline).values(),
            *self._base.rollouts.start(receive, dict(enumerate(arguments[1:])), deadline).values(),
        ]
        for future in futures:
            future.result()


def _require_all(report: SyncReport) -> None:
    """Raise RlctlError when a replica did not get what was sent: such a time means nothing."""
    if report.fenced:
        name, reason = next(iter(report.fenced.items()))
        raise RlctlError(f"version {report.version} did not reach {name}: {reason}")
