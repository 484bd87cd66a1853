"""One side of a sync as child processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, Role
from rlctl.sync.member_process import MemberProcess


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
        return member.begin(command, arguments, deadline)

    def close(self) -> None:
        """End every process."""
        for member in self.members:
            member.close()
