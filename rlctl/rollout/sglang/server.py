"""Starting an SGLang server beside its replica's process: options as data, a process that ends with its parent."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from rlctl.errors import RlctlError, UsageError
from rlctl.process import Channel, Child, start
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.rollout.sglang import requests
from rlctl.rollout.sglang.connection import SglangConnection, SglangError
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import ReplicaLostError

HOST = "127.0.0.1"
# What rlctl says itself; a user's further options may not.
_OURS = frozenset({"model-path", "host", "port", "api-key", "load-format", "dtype", "tp-size", "skip-tokenizer-init"})
_LOOK_SECONDS = 0.2


def server_options(setup: ReplicaSetup, port: int, key: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's options, as its ``--config`` file takes them.

    Args:
        setup: the replica's.
        port: to listen at, of the loopback interface.
        key: that every request has to bring.
        more: further options by their names on the command line, ``mem-fraction-static: 0.7``.
    """
    taken = sorted(name for name in more if name.replace("_", "-") in _OURS)
    if taken:
        raise UsageError(f"the option {taken[0]} of SGLang is set by rlctl", where="rollout.options")
    return {
        "model-path": setup.source,
        "host": HOST,
        "port": port,
        "api-key": key,
        "load-format": "dummy",  # weights come by a sync
        "dtype": setup.dtype,
        "tp-size": setup.tensor_parallel,
        "skip-tokenizer-init": True,
        "context-length": setup.max_length,
        "max-running-requests": setup.max_slots,
        "trust-remote-code": setup.trust_remote_code,
        "enable-memory-saver": True,
        "log-level": "warning",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


class SglangServer:
    """A running server; a context manager that ends it.

    Args:
        setup: the replica's.
        command: that starts a server, before ``--config FILE``.
        more: see ``server_options``.
        output: file for its log.
    """

    def __init__(self, setup: ReplicaSetup, command: Sequence[str], more: Mapping[str, Any], output: Path) -> None:
        port, self.key = free_port(), secrets.token_hex(16)
        self.url = f"http://{HOST}:{port}"
        # In a file, and not on the command line, which everybody can read.
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:  # mode 0600
            yaml.safe_dump(server_options(setup, port, self.key, more), file)
        self._config = Path(file.name)
        self._child: Child | None = start("rlctl.rollout.sglang.server:become", name="sglang", output=output)
        try:
            self._child.request([*command, "--config", file.name], 60.0)
        except BaseException:
            self.__exit__()
            raise

    def await_ready(self, connection: SglangConnection, deadline: Deadline) -> None:
        """Return once it takes requests. Raises ReplicaLostError, with what it said last, when it ends instead."""
        assert self._child is not None
        while True:
            try:
                connection.ask(requests.ready(), deadline.within(_LOOK_SECONDS * 10))
                return
            except (ReplicaLostError, SglangError) as error:
                reason = error.message
            if not self._child.alive():
                said = "\n".join(self._child.tail(20))
                raise ReplicaLostError(f"the SGLang server ended before it was up: {self._child.ending()}\n{said}")
            deadline.check(f"waiting for the SGLang server ({reason})")
            time.sleep(min(_LOOK_SECONDS, deadline.remaining))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._child is not None:
            self._child.kill(5.0)
            self._child = None
        self._config.unlink(missing_ok=True)


def become(channel: Channel) -> None:
    """Entry point of the child: it becomes the command that it is told, and still dies with its parent."""
    command = channel.receive(60.0, list[str])
    channel.send(True, 60.0)
    os.execvp(command[0], command)  # noqa: S606 - a list of words, as everywhere


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens at."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def launch_command(options: Mapping[str, Any]) -> list[str]:
    """Return the command of a server: SGLang's own, in the Python of ``options["python"]`` or this one."""
    command = options.get("command", [options.get("python", sys.executable), "-m", "sglang.launch_server"])
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise RlctlError(f"command={command!r} is no list of words", where="rollout.options")
    return command
