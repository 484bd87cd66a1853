"""Child processes: started with a channel to talk over, bounded in every wait, and gone when their parent is.

A child is a fresh interpreter that runs one function, ``module:function``, with the channel as its argument. It has
its own session, so the terminal's Ctrl-C reaches the parent alone and a kill reaches the child's own children too.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Protocol, Self, TypeVar

from rlctl.errors import RlctlError
from rlctl.process.channel import ANY, Channel, Deadline

T = TypeVar("T")

TOKEN_VARIABLE = "RLCTL_RUN_TOKEN"  # noqa: S105
_TAIL = 8192
_PR_SET_PDEATHSIG = 1
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rlctl.process import run_child; run_child()"


def run_token() -> str:
    """Return the random token of this run, the same in every process that the run starts."""
    return os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(16))


class ChildDied(RlctlError):  # noqa: N818
    """A child process ended without being asked to; ``reason`` says how."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"process {name!r} died: {reason}")
        self.reason = reason


class Child:
    """A running child process; a context manager that ends it. See ``start``."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], channel: Channel, output: Path | None = None
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.channel = channel
        self._process = process
        self._output = output

    def request(self, message: object, timeout: float, kind: type[T] = ANY) -> T:
        """Send ``message`` and return its ``answer``, both within ``timeout`` seconds; see there for errors."""
        deadline = Deadline(timeout)
        self._unless_dead(lambda: self.channel.send(message, deadline.remaining()))
        return self.answer(deadline.remaining(), kind)

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
        return not self._collected(0)

    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

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
        if not self._collected(grace):
            self.kill(grace)

    def kill(self, grace: float = 0.0) -> None:
        """End the process and those it started: SIGTERM, ``grace`` seconds later SIGKILL. Returns when it is gone."""
        self.channel.close()
        if self._process.returncode is not None:
            return
        # Its exit status has not been collected, so the id cannot be another process's by now.
        if grace > 0:
            os.killpg(self.pid, signal.SIGTERM)
            if self._collected(grace):
                return
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(10)

    def _collected(self, seconds: float) -> bool:
        """Wait for the end; once it has come, end what the process left behind in its group."""
        if self._process.returncode is not None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return True

    def ending(self) -> str:
        """Return in words how it ended; it has, or is about to."""
        if not self._collected(2.0):
            return "it closed its channel"
        return describe_exit(self._process.returncode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def describe_exit(returncode: int) -> str:
    """Return an exit status in words: ``SIGSEGV`` or ``exit code 3``."""
    return signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"


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
    # The parent-death signal is sent when the *thread* that forked ends, so one thread that never ends forks them all.
    process, channel = _forker().submit(_spawn, target, name, output, env).result()
    child = Child(name, process, channel, output)
    try:
        fault = child.request(None, timeout, str)
        if fault:
            raise ChildDied(name, fault)
    except BaseException:
        child.kill()
        raise
    return child


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


_FORKER: ThreadPoolExecutor | None = None


def _forker() -> ThreadPoolExecutor:
    global _FORKER
    if _FORKER is None:
        _FORKER = ThreadPoolExecutor(1, thread_name_prefix="rlctl-forker")
    return _FORKER


def _spawn(
    target: str, name: str, output: Path | None, env: Mapping[str, str] | None
) -> tuple[subprocess.Popen[bytes], Channel]:
    ours, theirs = socket.socketpair()
    path, descriptor, parent = json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())
    with theirs, Path(output or os.devnull).open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, path, descriptor, parent, target, f"rlctl:{name}"],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**os.environ, **(env or {}), TOKEN_VARIABLE: run_token()},
        )
    return process, Channel(ours)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, process ``parent``, is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def run_child() -> None:
    """Entry point of a child; its arguments are those that ``start`` gives."""
    descriptor, parent, target = sys.argv[2:5]
    die_with_parent(int(parent))
    os.set_inheritable(int(descriptor), False)
    channel = Channel(socket.socket(fileno=int(descriptor)))
    channel.receive(60.0)
    module, _, attribute = target.partition(":")
    try:
        function: Callable[[Channel], None] = getattr(import_module(module), attribute)
    except Exception as error:
        channel.send(f"{type(error).__name__}: {error}", 60.0)
        raise
    channel.send("", 60.0)
    try:
        function(channel)
    except EOFError:  # the parent closed the channel: that is how a child is asked to end
        return
