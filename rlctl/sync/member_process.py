"""One side of a sync as child processes: a member each, one command at a time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgspec

from rlctl.process import Child, ChildDied, Start, start
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, Role
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import MemberLostError, TransferError

# A member ends its waits by itself; one that says nothing this long after its deadline is stuck in a library's call.
GRACE = 0.5
START_SECONDS = 120.0
_SETTING_UP = ("open", "load")


class Answer(msgspec.Struct, array_like=True):
    """What a member's process says: to which message, the result or the error."""

    number: int
    result: Any = None
    error: ErrorData | None = None


class MemberProcess:
    """One member's process, seen from the manager's.

    Args:
        name: what errors call it.
        replica: the replica that a rollout member fills; empty for a trainer.
        part: which of the replica's ranks it is, where layouts are declared.
        target: entry point, ``module:function``.
        holds_weights: see protocols.Seat.
        restart: it is killed when it is stuck, and a process that ended is started again, at once and in the
            background; it gets its last ``open`` and ``load`` again.
        env: further environment variables.
        start: what starts the process.
    """

    def __init__(
        self,
        name: str,
        target: str,
        *,
        replica: str = "",
        part: int = 0,
        holds_weights: bool = False,
        restart: bool,
        env: Mapping[str, str] | None = None,
        start: Start = start,
    ) -> None:
        self.name = name
        self.replica = replica
        self.part = part
        self.holds_weights = holds_weights
        self.starts = 0
        self._target = target
        self._restart = restart
        self._env = env
        self._start_process = start
        self._child: Child | None = None
        self._set_up: dict[str, Mapping[str, Any]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._closed = False
        self._ending = ""

    @property
    def pid(self) -> int:
        """The process; it runs."""
        assert self._child is not None
        return self._child.pid

    def ask(self, command: str, arguments: Mapping[str, Any], deadline: Deadline) -> Any:
        """Return the answer to a command. Raises the member's own error, DeadlineError or PeerLostError."""
        what = f"{self.name}: {command}"
        if not self._lock.acquire(timeout=deadline.remaining):
            raise deadline.error(f"{what}: still busy with an earlier command")
        try:
            child = self._running(what, deadline)
            if command in _SETTING_UP:
                self._set_up[command] = arguments
            try:
                return self._request(child, command, arguments, deadline)
            except ChildDied:
                if command != "prepare" or not self._restart:
                    raise
                # It was dying when it was asked; nothing of this sync was lost with it.
                return self._request(self._running(what, deadline), command, arguments, deadline)
        except (ChildDied, EOFError, OSError) as error:
            self._ending = error.reason if isinstance(error, ChildDied) else "its channel closed"
            self._lose()
            how = f"died ({self._ending}) after {deadline.elapsed:.1f} s"
            raise MemberLostError(f"{what}: {self.name} {how}") from error
        finally:
            self._lock.release()

    def cancel(self) -> None:
        """Have the transfer under way stop."""
        child = self._child
        if child is not None:
            child.signal(signal.SIGUSR1)

    def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._child is not None:
            self._child.kill()

    def _running(self, what: str, deadline: Deadline) -> Child:
        if self._child is not None and not self._child.alive():
            self._ending = self._child.ending()
            self._child.kill()
            self._child = None
        if self._child is None:
            if self.starts and not self._restart:
                raise MemberLostError(f"{what}: {self.name} died before ({self._ending}) and is not started again")
            self._start(deadline)
        assert self._child is not None
        return self._child

    def _start(self, deadline: Deadline) -> None:
        self._child = self._start_process(self._target, name=self.name, timeout=deadline.remaining, env=self._env)
        self.starts += 1
        for command, arguments in self._set_up.items():
            self._request(self._child, command, arguments, deadline)

    def _request(self, child: Child, command: str, arguments: Mapping[str, Any], deadline: Deadline) -> Any:
        self._number += 1
        patience = Deadline(deadline.remaining + GRACE)
        try:
            answer = child.request([self._number, command, arguments], patience.remaining, Answer)
            while answer.number != self._number:  # the late answer to an earlier message
                answer = child.channel.receive(patience.remaining, Answer)
        except TimeoutError as error:
            what = f"{self.name}: {command}"
            if not self._restart or command == "finalize":  # what comes next finds it stuck, if it is
                raise deadline.error(what) from error
            self._lose()
            raise MemberLostError(f"{what}: stuck, killed after {deadline.elapsed:.1f} s") from error
        if answer.error is not None:
            raise answer.error.error()
        return answer.result

    def _lose(self) -> None:
        """Part with the process; a new one starts in the background, so that the next sync finds it ready."""
        if self._child is not None:
            self._child.kill()
            self._child = None
        if self._restart and not self._closed:
            call(self._revive, f"restart {self.name}")

    def _revive(self) -> None:
        with self._lock:
            if self._child is None and not self._closed:
                with suppress(
                    ChildDied, TimeoutError, TransferError
                ):  # the next ask tries again, and says what is wrong
                    self._start(Deadline(START_SECONDS))


class MemberProcesses:
    """The members of one side; a Group. See ``protocols.Group``.

    Args:
        role: which side.
        members: their processes, by rank, or how many to make.
        backend: name of the checkpoint engine.
        options: the engine's.
        target: entry point of a member's process.
        restart: as for MemberProcess; by default rollout workers may be, trainers not.
    """

    def __init__(
        self,
        role: Role,
        members: int | Sequence[MemberProcess],
        backend: str,
        options: EngineOptions,
        *,
        target: str = "rlctl.sync.member:serve",
        restart: bool | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.role: Role = role
        self._backend = backend
        self._options = options
        self._target = target
        self._restart = role == "rollout" if restart is None else restart
        self._env = env
        self._made = 0
        self.members: list[MemberProcess] = [] if isinstance(members, int) else list(members)
        for _ in range(members if isinstance(members, int) else 0):
            self.add()

    @property
    def names(self) -> list[str]:
        """What errors call the members, by rank."""
        return [m.name for m in self.members]

    def add(self) -> MemberProcess:
        """Add a member, and for a rollout member a replica of its name; between syncs only. Its process starts with
        its first command."""
        name = f"{self.role} {self._made}"
        replica = name if self.role == "rollout" else ""
        member = MemberProcess(
            name,
            self._target,
            replica=replica,
            holds_weights=self.role == "rollout",
            restart=self._restart,
            env=self._env,
        )
        self._made += 1
        self.members.append(member)
        return member

    def remove(self, name: str) -> None:
        """End a member's process and part with it. Between syncs only."""
        member = next(m for m in self.members if m.name == name)
        self.members.remove(member)
        member.close()

    def open(self, timeout: float) -> None:
        """Start every process and make every engine; called again after ``add``. What is open is opened anew."""
        arguments = {rank: self._opening(rank) for rank in range(len(self.members))}
        for future in self.start("open", arguments, Deadline(timeout)).values():
            future.result()

    def _opening(self, rank: int) -> dict[str, Any]:
        """Return the arguments of a member's ``open``."""
        return {
            "backend": self._backend,
            "role": self.role,
            "rank": rank,
            "world": len(self.members),
            "options": asdict(self._options),
            "part": self.members[rank].part,
        }

    def start(
        self, command: str, arguments: Mapping[int, Mapping[str, Any]], deadline: Deadline
    ) -> dict[int, Future[Any]]:
        """See Group."""
        return {place: self._call(self.members[place], command, args, deadline) for place, args in arguments.items()}

    def ask(self, command: str, deadline: Deadline, **arguments: Any) -> list[Any]:
        """Have every member run a command with the same arguments; return the results. Raises the first error."""
        futures = self.start(command, dict.fromkeys(range(len(self.members)), arguments), deadline)
        return [future.result() for future in futures.values()]

    def cancel(self, places: Iterable[int]) -> None:
        """See Group."""
        for place in places:
            self.members[place].cancel()

    def _call(
        self, member: MemberProcess, command: str, arguments: Mapping[str, Any], deadline: Deadline
    ) -> Future[Any]:
        return call(lambda: member.ask(command, arguments, deadline), f"{command} {member.name}")

    def close(self) -> None:
        """End every process."""
        for member in self.members:
            member.close()
