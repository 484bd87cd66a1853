"""A member of a sync as a child process, which obeys one command at a time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from rlctl.process import Child, ChildDied, Start, start
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import MemberLostError, TransferError
from rlctl.sync.owed import Owed

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
        self._owed: Owed | None = None  # the last
        self._closed = False
        self._ending = ""

    @property
    def pid(self) -> int:
        """The process; it runs."""
        assert self._child is not None
        return self._child.pid

    def ask(self, command: str, arguments: Mapping[str, Any], deadline: Deadline) -> Any:
        """Return the answer to a command. Raises the member's own error, DeadlineError or PeerLostError."""
        if self._owed is not None:  # nobody may be waiting for it, and it has the lock
            self._owed.fetch_beside()
        if not self._lock.acquire(timeout=deadline.remaining):
            raise deadline.error(f"{self.name}: {command}: still busy with an earlier command")
        return self._asked(command, arguments, deadline)

    def begin(self, command: str, arguments: Mapping[str, Any], deadline: Deadline) -> Future[Any]:
        """Return the answer to come. The message is sent before this returns, if the process is there and idle: to wake
        a thread for it takes as long as the rest."""
        what, patience = f"{command} {self.name}", Deadline(deadline.remaining + GRACE)
        held = False
        try:
            held = command not in _SETTING_UP and self._lock.acquire(blocking=False)
            if not held:
                return call(lambda: self.ask(command, arguments, deadline), what)
            told = self._child
            try:
                if told is not None and told.alive():
                    self._tell(told, command, arguments, patience)
                else:
                    told = None
            except ChildDied:  # as if it had before
                told = None
            except TimeoutError:  # its answer will not come in time, either
                pass
            if told is None:
                held = False  # the thread's, from now on
                return call(lambda: self._asked(command, arguments, deadline), what)
            fetch = partial(self._asked, command, arguments, deadline, told, patience)
            owed = Owed(told.channel, patience, fetch, what)
            self._owed, held = owed, False  # whoever asks next has it fetched
            return owed
        except BaseException:  # Ctrl-C: nobody would ever release it
            if held:
                self._lock.release()
            raise

    def _asked(
        self,
        command: str,
        arguments: Mapping[str, Any],
        deadline: Deadline,
        told: Child | None = None,
        patience: Deadline | None = None,
    ) -> Any:
        """Return the answer; the lock is held, and is released. ``told``: the process, if it has the message, and is
        waited for until ``patience``."""
        try:
            what = f"{self.name}: {command}"
            child = told or self._running(what, deadline)
            if command in _SETTING_UP:
                self._set_up[command] = arguments
            try:
                return self._request(child, command, arguments, deadline, patience if told else None)
            except ChildDied:
                if command != "prepare" or not self._restart:
                    raise
                # It was dying when it was asked; nothing of this sync was lost with it.
                return self._request(self._running(what, deadline), command, arguments, deadline)
        except TimeoutError as error:  # an OSError, too: what was started in its place was not up in time
            self._lose()
            ended = f"died ({self._ending}); its new process" if self._ending else "its process"
            raise MemberLostError(f"{what}: {self.name} {ended} was not up after {deadline.elapsed:.1f} s") from error
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

    def _tell(self, child: Child, command: str, arguments: Mapping[str, Any], patience: Deadline) -> None:
        self._number += 1
        child.tell([self._number, command, arguments], patience.remaining)

    def _request(
        self,
        child: Child,
        command: str,
        arguments: Mapping[str, Any],
        deadline: Deadline,
        patience: Deadline | None = None,
    ) -> Any:
        """Return the answer. ``patience``: until when it is waited for, where the process has the message already."""
        try:
            if patience is None:
                patience = Deadline(deadline.remaining + GRACE)
                self._tell(child, command, arguments, patience)
            answer = child.answer(patience.remaining, Answer)
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
