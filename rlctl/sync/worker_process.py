"""Checkpoint-engine workers and the inference processes behind them, as one side of a sync."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rlctl.errors import UsageError
from rlctl.process import Start, start
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import GivenUpError, MemberLostError, MismatchError, PeerLostError
from rlctl.sync.host import Received
from rlctl.sync.inlet import LoadOrder
from rlctl.sync.member_process import MemberProcess
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.protocols import LoadReport
from rlctl.sync.tensor_meta import TensorMeta, require_same_dtype
from rlctl.sync.transfer import named
from rlctl.sync.undertaker import Undertaker
from rlctl.sync.waiting import gather
from rlctl.sync.worker import Forwarded


class Loader(Protocol):
    """An inference process, as its worker's sync sees it: it has a WeightInlet."""

    def targets(self) -> Mapping[str, TensorMeta]:
        """Return the weights that it has, by name."""

    def load(self, order: LoadOrder, deadline: Deadline) -> LoadReport:
        """Take the weights through the inlet, in place. Raises when they are not whole."""


class WorkerProcesses(MemberProcesses):
    """A Group: one worker process for each replica, behind it the replica's inference processes; where layouts are
    declared, one for each rank of a replica.

    Args:
        backend: name of the checkpoint engine.
        options: the engine's.
        env: further environment variables of the workers.
        one_machine: whether all replicas are on this one; those elsewhere do not see its folders.
    """

    def __init__(
        self, backend: str, options: EngineOptions, *, env: Mapping[str, str] | None = None, one_machine: bool = True
    ) -> None:
        super().__init__("rollout", 0, backend, options, target="rlctl.sync.worker:serve", env=env)
        self._loaders: dict[str, Sequence[Loader]] = {}  # by the name of their worker, as the next
        self._staged: dict[str, LoadOrder] = {}
        self._one_machine = one_machine
        self._folder = Path(tempfile.mkdtemp(prefix="rlctl-sync-"))  # mode 0700
        self._undertaker = Undertaker(self._folder)

    def join(self, replica: str, loaders: Sequence[Loader], *, start: Start = start) -> None:
        """Add the worker of a replica, with the replica's inference processes, or with layouts a worker for each of
        them, by rank; ``open`` has ``start`` start it, on the replica's machine."""
        layouts = self._options.layouts
        if layouts is not None and len(loaders) != layouts.rollout.ranks:
            raise UsageError(
                f"{replica} has {len(loaders)} inference processes, and its layout {layouts.rollout.ranks} ranks"
            )
        for part, mine in enumerate([loaders] if layouts is None else [[loader] for loader in loaders]):
            name = f"worker of {replica}" if layouts is None else f"worker of rank {part} of {replica}"
            self._loaders[name] = mine
            self.members.append(
                MemberProcess(name, self._target, replica=replica, part=part, restart=True, env=self._env, start=start)
            )

    def leave(self, replica: str) -> None:
        """End what serves a replica."""
        for member in [m for m in self.members if m.replica == replica]:
            self.remove(member.name)
            del self._loaders[member.name]

    def close(self) -> None:
        """End every worker."""
        super().close()
        self._undertaker.close()

    def _opening(self, rank: int) -> dict[str, Any]:
        member = self.members[rank]
        return {**super()._opening(rank), "address": self.address(member.replica, member.part)}

    def address(self, replica: str, part: int = 0) -> str:
        """Return where a replica's worker listens for its inference processes; ``part``: the worker of that rank."""
        name = sha256(f"{self._folder.name} {part} {replica}".encode()).hexdigest()[:16]
        return f"unix:{self._folder / name}" if self._one_machine else f"unix:@rlctl-{name}"

    def _call(
        self, member: MemberProcess, command: str, arguments: Mapping[str, Any], deadline: Deadline
    ) -> Future[Any]:
        steps = {"receive": self._receive, "stage": self._stage, "commit": self._commit}
        if command not in steps:
            return super()._call(member, command, arguments, deadline)
        return call(lambda: steps[command](member, arguments, deadline), f"{command} {member.name}")

    def _receive(self, member: MemberProcess, arguments: Mapping[str, Any], deadline: Deadline) -> Any:
        self._staged.pop(member.name, None)
        order = self._order(member, arguments, staged=False)
        consumers = {"consumers": len(self._loaders[member.name])}
        data, reports = self._both(member, "receive", {**arguments, **consumers}, order, deadline)
        forwarded = msgspec.convert(data, Forwarded)
        digest = reports[0].digest or forwarded.digest
        received = Received(_merged(reports), forwarded.stats, digest, order.version, member.part)
        return msgspec.to_builtins(received, builtin_types=(bytes,))

    def _stage(self, member: MemberProcess, arguments: Mapping[str, Any], deadline: Deadline) -> Any:
        order = self._order(member, arguments, staged=True)
        forwarded = msgspec.convert(member.ask("stage", arguments, deadline), Forwarded)
        report = _merged([_compared(forwarded.metas, p.targets(), order.cast) for p in self._loaders[member.name]])
        self._staged[member.name] = order
        received = Received(report, forwarded.stats, forwarded.digest, order.version, member.part)
        return msgspec.to_builtins(received, builtin_types=(bytes,))

    def _commit(self, member: MemberProcess, arguments: Mapping[str, Any], deadline: Deadline) -> Any:
        order = self._staged.pop(member.name, None)
        if order is not None:
            consumers = {"consumers": len(self._loaders[member.name])}
            self._both(member, "commit", {**arguments, **consumers}, order, deadline)

    def _order(self, member: MemberProcess, arguments: Mapping[str, Any], *, staged: bool) -> LoadOrder:
        delta = self._options.delta
        return LoadOrder(
            self.address(member.replica, member.part),
            arguments["version"],
            None if delta and staged else arguments["base_version"],  # a shadow is of whole tensors
            self._options.verify,
            staged,
            arguments["cast"],
            delta,
        )

    def _both(
        self, member: MemberProcess, command: str, arguments: Mapping[str, Any], order: LoadOrder, deadline: Deadline
    ) -> tuple[Any, list[LoadReport]]:
        """Have the worker hand on and the inference processes load, at once. Raises the error that came first, unless
        it only says that another side was lost."""
        calls: dict[str, Future[Any]] = {
            member.name: call(lambda: member.ask(command, arguments, deadline), f"{command} {member.name}")
        }
        for number, process in enumerate(self._loaders[member.name]):
            name = f"inference process {member.part + number} of {member.replica}"
            calls[name] = call(lambda p=process: p.load(order, deadline), f"load {name}")  # type: ignore[misc]
        answers = gather(calls, deadline, f"loading into {member.replica}", on_error=lambda _: member.cancel())
        errors = list(answers.errors.items())
        if errors:
            own = [(n, e) for n, e in errors if not isinstance(e, (PeerLostError, GivenUpError))]
            lost = [(n, e) for n, e in errors if isinstance(e, MemberLostError)]
            name, error = (lost or own or errors)[0]
            raise ErrorData(type(error).__name__, named(name, error), error.where, error.fix).error()
        reports = [answers.results[name] for name in calls if name != member.name]
        return answers.results[member.name], reports


def _merged(reports: Sequence[LoadReport]) -> LoadReport:
    """Return what all of a replica's inference processes have loaded, and what any of them misses."""
    unknown = {name for report in reports for name in report.unknown}
    untouched = {name for report in reports for name in report.untouched}
    return LoadReport([n for n in reports[0].loaded if n not in unknown], sorted(unknown), sorted(untouched))


def _compared(metas: Sequence[TensorMeta], targets: Mapping[str, TensorMeta], cast: bool) -> LoadReport:
    for meta in metas:
        target = targets.get(meta.name)
        if target is not None and target.shape != meta.shape:
            raise MismatchError(f"tensor {meta.name} is sent as {meta.shape}, and the engine holds {target.shape}")
        if target is not None and not cast:
            require_same_dtype(meta, target.dtype)
    names = {meta.name for meta in metas}
    return LoadReport(
        [m.name for m in metas if m.name in targets],
        [m.name for m in metas if m.name not in targets],
        [name for name in targets if name not in names],
    )
