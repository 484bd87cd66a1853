"""The driver's end of the channel to a replica's process: numbered calls, what the process says, and its death."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec

from rlctl.process import Child
from rlctl.rollout.remote.messages import SAID, Answer, Command, Failed, Fence, Order, Said
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import ReplicaLostError

# A call ends its waits by itself; it is given up this long after its deadline.
GRACE = 0.5
_LINES = 5


class Connection:
    """Of one life of a replica's process. Ends it when it is stuck.

    Args:
        replica: its name.
        child: the process; it is ready.
        silence: seconds until a process that has work and says nothing is taken for dead.
        has_work: whether it is expected to say something, apart from calls.
        on_said: told what it says but answers, from a thread of the connection's own.
        on_lost: told why it is gone, from the same thread, after all calls have failed; not when it was closed.
    """

    def __init__(
        self,
        replica: str,
        child: Child,
        *,
        silence: float,
        has_work: Callable[[], bool],
        on_said: Callable[[Said], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.replica = replica
        self.child = child
        self._silence = silence
        self._has_work = has_work
        self._on_said, self._on_lost = on_said, on_lost
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._reason = ""
        self._lost = self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"rlctl-replica-{replica}", daemon=True)
        self._thread.start()

    def call(self, command: str, deadline: Deadline, **arguments: Any) -> Any:
        """Return the answer to a command. Raises the process's own error, DeadlineError or ReplicaLostError."""
        future: Future[Any] = Future()
        with self._lock:
            if self._lost or self._closing:
                raise self.lost_error()
            number = next(self._numbers)
            self._waiting[number] = future
        self.post(Command(number, command, arguments, deadline.remaining))
        try:
            return future.result(min(deadline.remaining + GRACE, threading.TIMEOUT_MAX))
        except TimeoutError as error:  # the answer stays due: a process that never gives it is stuck
            raise deadline.error(f"replica {self.replica}: {command}") from error

    def fence(self, reason: str) -> None:
        """Have it fenced; returns at once. A ``resume`` that is called later is not undone."""
        with self._lock:
            order = Fence(next(self._numbers), reason)
        call(lambda: self.post(order), f"fence {self.replica}")

    def post(self, order: Order) -> None:
        """Send something. When the process is gone, ``on_lost`` says so."""
        with self._sending:
            try:
                self.child.channel.send(order, self._silence)
            except TimeoutError:
                self.end(f"it took no message for {self._silence:g} s, and was killed")
            except OSError:
                return  # the thread that reads sees it, too

    def end(self, reason: str) -> None:
        """Kill the process; it counts as lost for this reason."""
        with self._lock:
            self._reason = self._reason or reason
        self._kill()

    def close(self) -> None:
        """End the process; ``on_lost`` is not told."""
        with self._lock:
            self._closing = True
        self.child.close()
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def lost_error(self) -> ReplicaLostError:
        """Return the error of a call that comes too late."""
        reason = "it was closed" if self._closing and not self._reason else self._reason
        return ReplicaLostError(f"replica {self.replica} is lost: {reason}")

    def _run(self) -> None:
        try:
            reason = self._until_lost()
        except Exception as error:  # noqa: BLE001 - of who was told; without this thread nobody hears of the replica
            reason = f"what it said was not taken ({type(error).__name__}: {error})"
        with self._lock:
            self._reason = self._reason or reason
        self._kill()
        with self._lock:
            self._lost = True
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(self.lost_error())
        if not self._closing:
            self._on_lost(self._reason)

    def _until_lost(self) -> str:
        """Hear what the process says; return why it says no more."""
        patience, quiet = min(1.0, self._silence / 4), 0.0
        while True:
            try:
                said: Said = self.child.channel.receive(patience, SAID)
            except TimeoutError:
                # Counted in waits, so that a pause of this process is not held against the other.
                quiet = quiet + patience if self._waiting or self._has_work() else 0.0
                if quiet >= self._silence:
                    return f"it has said nothing for {self._silence:g} s, and was killed{last_lines(self.child)}"
                continue
            except (EOFError, OSError):
                return f"{self.child.ending()}{last_lines(self.child)}" if not self._closing else "it was closed"
            except msgspec.MsgspecError as error:
                return f"it said what is no message of ours ({error})"
            quiet = 0.0
            if isinstance(said, Failed):
                return said.error.sentence
            if isinstance(said, Answer):
                self._take(said)
            else:
                self._on_said(said)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # another thread found it gone meanwhile
            self.child.kill()

    def _take(self, answer: Answer) -> None:
        with self._lock:
            future = self._waiting.pop(answer.number)
        if answer.error is None:
            future.set_result(answer.result)
        else:
            future.set_exception(answer.error.error())


def last_lines(child: Child) -> str:
    """Return the end of a process's output, to be put behind a sentence."""
    with suppress(OSError):
        return "".join(f"\n    {line}" for line in child.tail(_LINES))
    return ""
