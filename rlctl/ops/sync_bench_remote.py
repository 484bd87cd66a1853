"""The rollout workers of another host, as the side of a sync that the manager of this host sees."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from rlctl.errors import RlctlError
from rlctl.ops.sync_bench_choice import Unavailable
from rlctl.ops.sync_bench_link import PING_SECONDS, SILENCE_SECONDS, Answer, Request, end, own_host
from rlctl.sync.calls import call
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.errors import MemberLostError, PeerLostError, TransferError
from rlctl.sync.waiting import GRACE

_FOREVER = float("inf")
_SEND_SECONDS = 30.0
_CLOSE_SECONDS = 15.0


class OtherHostGoneError(RlctlError):
    """The host with the rollout workers has ended, or its connection has."""


class OtherHost:
    """The host that connected, to be asked from several threads.

    Args:
        channel: greeted already.
        token: of the connections between members.
    """

    def __init__(self, channel: Channel, token: str) -> None:
        self.token = token
        self.interface = own_host(channel)
        self.host = ""
        self.free = 0
        self._channel = channel
        self._gone = ""
        self._numbers = itertools.count(1)
        self._squads = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._heard: Deadline | None = None  # since the last answer; none before the first, while libraries load there
        self._reader = threading.Thread(target=self._read, name="rlctl-other-host", daemon=True)
        self._reader.start()
        threading.Thread(target=self._ping, name="rlctl-ping", daemon=True).start()

    def survey(self, backends: Sequence[str]) -> list[Unavailable]:
        """Return which backends cannot run there and why; learn its name and how much memory is free."""
        found = self.ask("survey", {"backends": list(backends)}, Deadline(120.0))
        self.host, self.free = found["host"], found["free"]
        return [
            Unavailable(a.backend, f"on {self.host}: {a.reason}", a.remedy)
            for a in msgspec.convert(found["absent"], list[Unavailable])
        ]

    def members(self, backend: str, count: int, options: EngineOptions) -> RemoteMembers:
        """Return a side of rollout workers there."""
        return RemoteMembers(self, next(self._squads), backend, count, options)

    def check(self) -> None:
        """Raise OtherHostGoneError when it has gone."""
        if self._gone:
            raise OtherHostGoneError(
                f"the other host has gone: {self._gone}", fix="its own output says why; start both sides again"
            )

    def ask(self, kind: str, body: Mapping[str, Any], deadline: Deadline) -> Any:
        """Return the answer. Raises what was raised there, MemberLostError when none comes, or the host is gone."""
        with self._lock:
            if self._gone:
                raise MemberLostError(f"the other host has gone: {self._gone}")
            number, future = next(self._numbers), Future[Any]()
            self._pending[number] = future
        self._send(Request(number, kind, dict(body)))
        try:
            return future.result(deadline.remaining + GRACE)
        except FutureTimeoutError as error:
            raise MemberLostError(deadline.error(f"the other host, asked to {kind}").message) from error
        finally:
            with self._lock:
                self._pending.pop(number, None)

    def tell(self, kind: str, body: Mapping[str, Any]) -> None:
        """Send what has no answer."""
        self._send(Request(0, kind, dict(body)))

    def close(self, *, done: bool) -> None:
        """End the connection; ``done``: having said that all is measured."""
        self._ended.set()
        if done and not self._gone:
            self.tell("bye", {})
        end(self._channel)
        self._reader.join(5.0)

    def _send(self, request: Request) -> None:
        data = msgspec.msgpack.encode(request)
        try:
            with self._sending:
                self._channel.send(data, Deadline(_SEND_SECONDS))
        except (TransferError, OSError) as error:
            self._lose(error)

    def _ping(self) -> None:
        while not self._ended.wait(PING_SECONDS) and not self._gone:
            heard = self._heard
            if heard is not None and heard.over:
                self._lose(PeerLostError(f"it has said nothing for {SILENCE_SECONDS:.0f} s"))
                end(self._channel)
                return
            self.tell("ping", {})

    def _read(self) -> None:
        try:
            while True:
                data = self._channel.receive(Deadline(_FOREVER))
                answer = msgspec.msgpack.decode(data, type=Answer)
                self._heard = Deadline(SILENCE_SECONDS)
                with self._lock:
                    future = self._pending.pop(answer.number, None)
                if future is None:  # a ping's, or it came too late
                    continue
                if answer.error is not None:
                    future.set_exception(answer.error.error())
                else:
                    future.set_result(answer.result)
        except (TransferError, OSError, msgspec.DecodeError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        reason = error.message if isinstance(error, RlctlError) else str(error)
        with self._lock:
            self._gone = self._gone or reason
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(PeerLostError(f"the other host has gone: {reason}"))


@dataclass(frozen=True)
class RemoteSeat:
    """See protocols.Seat."""

    name: str
    replica: str
    holds_weights: bool = True


class RemoteMembers:
    """Rollout workers of the other host: a Group, and as ``MemberProcesses`` to those who open and close it."""

    def __init__(self, other: OtherHost, squad: int, backend: str, count: int, options: EngineOptions) -> None:
        self._other = other
        self._squad = squad
        self._backend = backend
        self._options = options
        self.members = [RemoteSeat(f"rollout {k}", f"rollout {k}") for k in range(count)]

    def open(self, timeout: float) -> None:
        """Start the processes there."""
        # Each side knows its own address and derives the token.
        options = {name: value for name, value in asdict(self._options).items() if name not in ("token", "interface")}
        body = {"squad": self._squad, "backend": self._backend, "count": len(self.members), "options": options}
        self._other.ask("open", {**body, "timeout": timeout}, Deadline(timeout))

    def start(
        self, command: str, arguments: Mapping[int, Mapping[str, Any]], deadline: Deadline
    ) -> dict[int, Future[Any]]:
        """See Group."""
        return {place: self._call(place, command, args, deadline) for place, args in arguments.items()}

    def ask(self, command: str, deadline: Deadline, **arguments: Any) -> list[Any]:
        """Have every member run a command with the same arguments; return the results. Raises the first error."""
        futures = self.start(command, dict.fromkeys(range(len(self.members)), arguments), deadline)
        return [future.result() for future in futures.values()]

    def cancel(self, places: Iterable[int]) -> None:
        """See Group."""
        self._other.tell("cancel", {"squad": self._squad, "places": list(places)})

    def close(self) -> None:
        """End the processes there."""
        with suppress(RlctlError):  # then they have ended already, or end with their host's connection
            self._other.ask("close", {"squad": self._squad}, Deadline(_CLOSE_SECONDS))

    def _call(self, place: int, command: str, arguments: Mapping[str, Any], deadline: Deadline) -> Future[Any]:
        body = {"squad": self._squad, "place": place, "command": command, "arguments": arguments}
        timed = {**body, "timeout": deadline.remaining}
        return call(lambda: self._other.ask("do", timed, deadline), f"{command} rollout {place} of the other host")
