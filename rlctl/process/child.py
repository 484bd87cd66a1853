"""Child processes: started with a channel to talk over, bounded in every wait, and gone when their parent is.

A child is a fresh interpreter that runs one function, ``module:function``, with the channel as its argument. It has
its own session, so the terminal's Ctrl-C reaches the parent alone and a kill reaches the child's own children too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self, TypeVar

from rlctl.errors import RlctlError
from rlctl.process.channel import ANY, Channel, Deadline
from rlctl.process.running import LocalProcess, Running
from rlctl.process.spawning import Program, spawn

T = TypeVar("T")

_TAIL = 8192
_DYING_SECONDS = 30.0


class ChildDied(RlctlError):  # noqa: N818
    """A child process ended without being asked to; ``reason`` says how."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"process {name!r} died: {reason}")
        self.reason = reason


class Child:
    """A running child process; a context manager that ends it. See ``start``.

    Args:
        name: what messages call it.
        process: the process itself.
        channel: to it.
        output: file that what it prints comes to; None where that is discarded.
    """

    def __init__(self, name: str, process: Running, channel: Channel, output: Path | None = None) -> None:
        self.name = name
        self.pid = process.pid
        self.channel = channel
        self._process = process
        self._output = output

    def begin(self, timeout: float) -> Self:
        """Have it import its function, and return it; it is killed when it does not in time.

        Raises:
            ChildDied: it ended before it was up.
            TimeoutError: it was not up in time.
        """
        try:
            fault = self.request(None, timeout, str)
            if fault:
                raise ChildDied(self.name, fault)
        except BaseException:
            self.kill()
            raise
        return self

    def request(self, message: object, timeout: float, kind: type[T] = ANY) -> T:
        """Send ``message`` and return its ``answer``, both within ``timeout`` seconds; see there for errors."""
        deadline = Deadline(timeout)
        self.tell(message, deadline.remaining())
        return self.answer(deadline.remaining(), kind)

    def tell(self, message: object, timeout: float) -> None:
        """Send ``message`` within ``timeout`` seconds; see ``request``."""
        self._unless_dead(lambda: self.channel.send(message, timeout))

    def answer(self, timeout: float, kind: type[T] = ANY) -> T:
        """Return the answer to a request that had none in time. Raises ChildDied, or TimeoutError: the child may still
        be at work then, so kill it before another request."""
        return self._unless_dead(lambda: self.channel.receive(timeout, kind))

    def _unless_dead(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise ChildDied(self.name, self.ending()) from error

    def alive(self) -> bool:
        """Whether the process still runs."""
        return not self._process.wait(0)

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal, if it still runs, to it, or to it and those it started."""
        if self.alive():
            self._process.signal(number, group=group)

    def tail(self, lines: int) -> list[str]:
        """Return the last lines of its output that are not blank; none where that is discarded."""
        if self._output is None:
            return []
        with self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - _TAIL))
            text = file.read().decode(errors="replace").splitlines()
        return [line for line in text if line.strip()][-lines:]

    def close(self, grace: float = 2.0) -> None:
        """Ask it to end by closing the channel, wait ``grace`` seconds, then ``kill``."""
        self.channel.close()
        if not self._process.wait(grace):
            self.kill(grace)

    def kill(self, grace: float = 0.0) -> None:
        """End the process and those it started: SIGTERM, ``grace`` seconds later SIGKILL. Returns when it is gone."""
        self.channel.close()
        if self._process.ended:
            return
        if grace > 0:
            self._process.signal(signal.SIGTERM, group=True)
            if self._process.wait(grace):
                return
        self._process.signal(signal.SIGKILL, group=True)
        if not self._process.wait(_DYING_SECONDS):
            raise TimeoutError(f"process {self.name!r} ({self.pid}) does not end")

    def ending(self) -> str:
        """Return in words how it ended; it has, or is about to."""
        if not self._process.wait(2.0):
            return "it closed its channel"
        return self._process.ending()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Start(Protocol):
    """What starts a child process: ``start``, or what does the same somewhere else."""

    def __call__(
        self,
        target: str,
        *,
        name: str,
        timeout: float = 60.0,
        output: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """See ``start``."""


def start(
    target: str,
    *,
    name: str,
    timeout: float = 60.0,
    output: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start a child process that runs ``target(channel)`` and return once it is up.

    Args:
        target: ``module:function``, importable with this process's ``sys.path``.
        name: what messages, and ``ps``, call it.
        timeout: seconds until it must have imported ``target``.
        output: file that its standard output and error are appended to; None discards them.
        env: further environment variables.

    Raises:
        ChildDied: it ended before it was up.
        TimeoutError: it was not up in time; it has been killed.
    """
    program = Program(target, name, sys.path, {**os.environ, **(env or {})})
    ours, theirs = socket.socketpair()
    with theirs, Path(output or os.devnull).open("ab") as sink:
        process = spawn(program, theirs, sink.fileno())
    return Child(name, LocalProcess(process), Channel(ours), output).begin(timeout)
