"""The two sides of a new process: who starts it, and what it does first."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module

from rlctl.process.channel import Channel

TOKEN_VARIABLE = "RLCTL_RUN_TOKEN"  # noqa: S105
_PR_SET_PDEATHSIG = 1
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rlctl.process import run_child; run_child()"


def run_token() -> str:
    """Return the random token of this run, the same in every process that the run starts."""
    return os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(16))


@dataclass(frozen=True)
class Program:
    """What a child runs.

    Attributes:
        target: ``module:function``.
        name: what ``ps`` calls it.
        path: its ``sys.path``.
        env: its whole environment; the run's token is added.
        folder: its working directory; None for that of who starts it.
    """

    target: str
    name: str
    path: Sequence[str]
    env: Mapping[str, str]
    folder: str | None = None


def spawn(program: Program, sock: socket.socket, output: int) -> subprocess.Popen[bytes]:
    """Start a process that talks over ``sock``, of which it has a copy, and writes what it prints to the open file
    ``output``. It dies with this process."""
    # The parent-death signal is sent when the *thread* that forked ends, so one thread that never ends forks them all.
    return _forker().submit(_spawn, program, sock, output).result()


_FORKER: ThreadPoolExecutor | None = None


def _forker() -> ThreadPoolExecutor:
    global _FORKER
    if _FORKER is None:
        _FORKER = ThreadPoolExecutor(1, thread_name_prefix="rlctl-forker")
    return _FORKER


def _spawn(program: Program, sock: socket.socket, output: int) -> subprocess.Popen[bytes]:
    path, descriptor, parent = json.dumps(list(program.path)), str(sock.fileno()), str(os.getpid())
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, path, descriptor, parent, program.target, f"rlctl:{program.name}"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[sock.fileno()],
        start_new_session=True,
        env={**program.env, TOKEN_VARIABLE: run_token()},
        cwd=program.folder,
    )


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, process ``parent``, is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def run_child() -> None:
    """Entry point of a child; its arguments are those that ``spawn`` gives."""
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
