"""One transfer between two groups: prepare on all, topology, connections, send and receive at once, verification."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rlctl.errors import RlctlError, UsageError
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import CheckpointEngine, TransferStats
from rlctl.sync.errors import CorruptedError, DeadlineError, GivenUpError, MismatchError, PeerLostError
from rlctl.sync.host import Received
from rlctl.sync.protocols import Group
from rlctl.sync.states import State
from rlctl.sync.traits import Delivery
from rlctl.sync.waiting import Answers, gather

Key = tuple[Literal["trainer", "rollout"], int]


@dataclass(frozen=True)
class Request:
    """What is to be transferred.

    Attributes:
        version: of the weights.
        base_version: what all receivers hold, for deltas; None sends everything in full.
        command: ``receive`` (into the live weights) or ``stage`` (into a shadow).
        cast: targets may have other dtypes.
        partial: the stream may leave tensors of the engine untouched.
        again: the trainers send what they kept of ``version``, not what their weights are now.
    """

    version: int
    base_version: int | None
    command: Literal["receive", "stage"]
    cast: bool
    partial: bool
    again: bool = False


@dataclass
class Result:
    """What became of it.

    Attributes:
        sent: of each trainer rank.
        received: rollout place -> what arrived there, all of it.
        failed: rollout place -> why it did not.
        trainers: trainer rank -> its error.
        reached: the state it came to.
        delivery: what reached the workers: their ranks' slices, or whole tensors.
    """

    sent: list[TransferStats] = field(default_factory=list)
    received: dict[int, Received] = field(default_factory=dict)
    failed: dict[int, RlctlError] = field(default_factory=dict)
    trainers: dict[int, RlctlError] = field(default_factory=dict)
    reached: State = State.PREPARE
    delivery: Delivery = "whole"

    @property
    def going(self) -> bool:
        """Whether nobody has failed so far."""
        return not self.failed and not self.trainers

    def reason(self, place: int, trainers: Group, rollouts: Group) -> str:
        """Return why a rollout member got nothing: its own fault, or that of those who kept it from getting it."""
        senders = [(named(trainers.members[rank].name, e), e) for rank, e in self.trainers.items()]
        receivers = {p: (named(rollouts.members[p].name, e), e) for p, e in self.failed.items()}
        everybody = [*senders, *receivers.values()]
        own = [receivers[place]] if place in receivers else []
        blamed = [b for b in own if not _follows(b[1])] or [b for b in everybody if not _follows(b[1])]
        return "; ".join(f"{self.reached}: {reason}" for reason, _ in blamed or own or everybody)


class Transfer:
    """One attempt to bring weights to some rollout members.

    Args:
        trainers: all send.
        rollouts: the side of the receivers.
        places: those that take part, by place in ``rollouts.members``.
        engine: the class of the members' engines.
        deadline: for all of it.
    """

    def __init__(
        self,
        trainers: Group,
        rollouts: Group,
        places: Iterable[int],
        engine: type[CheckpointEngine],
        deadline: Deadline,
    ) -> None:
        self._groups: dict[str, Group] = {"trainer": trainers, "rollout": rollouts}
        self._keys: list[Key] = [("trainer", i) for i in range(len(trainers.members))]
        self._keys += [("rollout", i) for i in places]
        self._engine = engine
        self._deadline = deadline
        self.result = Result()

    def prepare(self) -> list[dict[str, Any]]:
        """Have every member prepare, and return its metadata, trainers first."""
        seats = {}
        for role in ("trainer", "rollout"):
            mine = [k for k in self._keys if k[0] == role]
            for rank, key in enumerate(mine):
                seats[key] = {"timeout": self._deadline.remaining, "rank": rank, "world": len(mine)}
        answers = self._all("prepare", seats)
        return [answers.results[key] for key in self._keys if key in answers.results]

    def base(self, proposed: int | None, command: str, metadata: list[dict[str, Any]]) -> int | None:
        """Return the proposed base version of deltas, or None when a member does not have it: everything goes whole."""
        bases = [member["bases"] for member in metadata]
        agreed = all(b.get(c, proposed) == proposed for b in bases for c in ("send", command))
        return proposed if agreed else None

    def connect(self, metadata: list[dict[str, Any]]) -> None:
        """Build the topology and have every member connect."""
        self.result.reached = State.CONNECT
        trainers = len([k for k in self._keys if k[0] == "trainer"])
        layouts = [member.get("layouts", "") for member in metadata]
        if len(set(layouts)) > 1:
            odd = [self._name(k) for k, declared in zip(self._keys, layouts, strict=True) if declared != layouts[0]]
            raise UsageError(
                f"{', '.join(odd)}: declared other layouts of ranks than {self._name(self._keys[0])}",
                fix="all members of a sync are told the same layouts, or none",
            )
        self.result.delivery = "slices" if layouts[0] else "whole"
        kwargs = self._engine.build_topology(trainers, len(self._keys) - trainers, metadata)
        assert len(kwargs) == len(self._keys)
        self._all("init_process_group", dict(zip(self._keys, kwargs, strict=True)))

    def move(self, request: Request) -> None:
        """Send and receive, and check what was received: names, version, digest."""
        self.result.reached = State.TRANSFER
        versions = {"version": request.version, "base_version": request.base_version}
        arguments = {key: versions if key[0] == "trainer" else {**versions, "cast": request.cast} for key in self._keys}
        futures = {
            **self._start("trainer", "resend" if request.again else "send", arguments),
            **self._start("rollout", request.command, arguments),
        }
        waiting = set(self._keys)

        def on_error(failed: Key) -> None:
            waiting.discard(failed)
            receivers = [place for role, place in waiting if role == "rollout"]
            if failed[0] == "trainer":
                self._groups["rollout"].cancel(receivers)
            elif not receivers:
                self._groups["trainer"].cancel([place for role, place in waiting if role == "trainer"])

        answers = self._note(gather(futures, self._deadline, request.command, on_error=on_error))
        for (role, place), data in sorted(answers.results.items()):
            if role == "trainer":
                self.result.sent.append(msgspec.convert(data, TransferStats))
            else:
                self._check(place, msgspec.convert(data, Received), request)

    def _check(self, place: int, received: Received, request: Request) -> None:
        report = received.report
        odd = [*report.unknown, *(() if request.partial else report.untouched)]
        alike = (r for r in self.result.received.values() if r.part == received.part)
        first = next(alike, received)
        if odd:
            self.result.failed[place] = MismatchError(
                f"loaded {len(report.loaded)}, unknown {len(report.unknown)}, untouched {len(report.untouched)} "
                f"({', '.join(odd[:3])}{', ...' if len(odd) > 3 else ''})",
                fix="the names sent and the names of the engine must be the same; compare them by rlctl convert-keys",
            )
        elif received.version != request.version or received.digest != first.digest:
            self.result.failed[place] = CorruptedError(
                f"version {received.version} with another digest than the other replicas' arrived"
            )
        else:
            self.result.received[place] = received

    def _name(self, key: Key) -> str:
        return self._groups[key[0]].members[key[1]].name

    def _all(self, command: str, arguments: dict[Key, dict[str, Any]]) -> Answers[Key]:
        futures = {**self._start("trainer", command, arguments), **self._start("rollout", command, arguments)}
        return self._note(gather(futures, self._deadline, command))

    def _start(self, role: str, command: str, arguments: dict[Key, dict[str, Any]]) -> dict[Key, Future[Any]]:
        mine = {place: args for (r, place), args in arguments.items() if r == role}
        started = self._groups[role].start(command, mine, self._deadline)
        return {key: started[key[1]] for key in arguments if key[0] == role}

    def _note(self, answers: Answers[Key]) -> Answers[Key]:
        for (role, place), error in answers.errors.items():
            (self.result.trainers if role == "trainer" else self.result.failed)[place] = error
        return answers


def named(name: str, error: RlctlError) -> str:
    """Return an error's message with the name of who had it, once."""
    return error.message if error.message.startswith(name) else f"{name}: {error.message}"


def _follows(error: RlctlError) -> bool:
    """Whether an error is what one sees of another's: it waited in vain, or was left."""
    return isinstance(error, (GivenUpError, DeadlineError)) or type(error) is PeerLostError
