"""The host that connects: it runs rollout workers for a sync bench that the listening host leads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec
import psutil

from rlctl.errors import RlctlError
from rlctl.ops.sync_bench_choice import absence
from rlctl.ops.sync_bench_contest import TARGET
from rlctl.ops.sync_bench_link import SILENCE_SECONDS, Answer, Request, end, own_host
from rlctl.sync.calls import call
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import TransferError
from rlctl.sync.member_processes import MemberProcesses

_SEND_SECONDS = 60.0


class RolloutHost:
    """Answers one listening host until it says that all is measured.

    Args:
        channel: greeted already.
        token: of the connections between members.
    """

    def __init__(self, channel: Channel, token: str) -> None:
        self.receipts = 0
        self.backends: list[str] = []
        self._channel = channel
        self._token = token
        self._interface = own_host(channel)
        self._sides: dict[int, MemberProcesses] = {}
        self._sending = threading.Lock()

    def serve(self, on_backend: Callable[[str], None] = lambda _: None) -> None:
        """Do what is asked. Raises RlctlError when the other side goes away early; ends every process it started."""
        try:
            while True:
                request = msgspec.msgpack.decode(self._channel.receive(Deadline(SILENCE_SECONDS)), type=Request)
                if request.kind == "bye":
                    return
                self._begin(request, on_backend)
        except (TransferError, OSError, msgspec.DecodeError) as error:
            reason = error.message if isinstance(error, RlctlError) else str(error)
            raise RlctlError(
                f"the listening host ended before all was measured: {reason}", fix="its own output says why"
            ) from error
        finally:
            for side in list(self._sides.values()):
                side.close()
            end(self._channel)

    def _begin(self, request: Request, on_backend: Callable[[str], None]) -> None:
        body = request.body
        if request.kind == "ping":
            self._send(Answer(request.number))
        elif request.kind == "cancel":
            self._sides[body["squad"]].cancel(body["places"])
        elif request.kind == "do":
            self._do(request.number, **body)
        elif request.kind == "open":
            if body["backend"] not in self.backends:
                self.backends.append(body["backend"])
                on_backend(body["backend"])
            # Made here, so that a later request finds it; started in a thread, so that pings are heard meanwhile.
            side = self._sides[body["squad"]] = self._side(body["backend"], body["count"], body["options"])
            self._answer_in_time(request.number, call(lambda: side.open(body["timeout"]), "open"))
        elif request.kind == "close":
            old = self._sides.pop(body["squad"])
            self._answer_in_time(request.number, call(old.close, "close"))
        elif request.kind == "survey":
            self._answer_in_time(request.number, call(lambda: _survey(body["backends"]), "survey"))
        else:
            error = RlctlError(f"{request.kind!r} is nothing that this version of rlctl is asked for")
            self._send(Answer(request.number, error=ErrorData.of(error)))

    def _side(self, backend: str, count: int, options: Mapping[str, Any]) -> MemberProcesses:
        own = EngineOptions(**{**options, "token": self._token, "interface": self._interface})
        return MemberProcesses("rollout", count, backend, own, target=TARGET, restart=False)

    def _do(
        self, number: int, squad: int, place: int, command: str, arguments: Mapping[str, Any], timeout: float
    ) -> None:
        if command == "receive":
            self.receipts += 1
        future = self._sides[squad].start(command, {place: arguments}, Deadline(timeout))[place]
        self._answer_in_time(number, future)

    def _answer_in_time(self, number: int, future: Future[Any]) -> None:
        def answer(done: Future[Any]) -> None:
            error = done.exception()
            self._send(Answer(number, error=ErrorData.of(error)) if error else Answer(number, done.result()))

        future.add_done_callback(lambda done: call(lambda: answer(done), "answer"))

    def _send(self, answer: Answer) -> None:
        # When the other side is gone, ``serve`` hears of it.
        with suppress(TransferError, OSError), self._sending:
            self._channel.send(msgspec.msgpack.encode(answer), Deadline(_SEND_SECONDS))


def _survey(backends: list[str]) -> dict[str, Any]:
    absent = [found for found in map(absence, backends) if found is not None]
    return {"host": socket.gethostname(), "free": psutil.virtual_memory().available, "absent": absent}
