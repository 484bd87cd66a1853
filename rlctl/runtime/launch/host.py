"""The side of a node: starts processes for a run that may be elsewhere, sends what they print, and tells their ends.

A process gets its connection to the run ready made, so that it is like any child of the run. It dies with the host,
and the host ends all of them when the run is gone.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlctl.errors import RlctlError
from rlctl.process import TOKEN_VARIABLE, LocalProcess, Program, spawn
from rlctl.runtime.launch.host_messages import (
    BEAT_SECONDS,
    SILENCE_SECONDS,
    Beat,
    Clock,
    Ended,
    FromHost,
    Hello,
    Output,
    Refused,
    Signal,
    Spawn,
    Started,
    ToHost,
    receive,
    send,
)
from rlctl.runtime.launch.places import shown
from rlctl.sync.channel import Channel, connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import TransferError

THE_RUN = "the run"
_CHUNK = 1 << 16
_CONNECT_SECONDS = 30.0
# What is still in the pipe of a process that has ended is read this long; a grandchild may hold it open for ever.
_DRAIN_SECONDS = 1.0
# What Ray sets for its own workers.
_RAYS_OWN = ("RAY_", "PYTHONBREAKPOINT", "OMP_NUM_THREADS")


class Host:
    """Serves one run; Ray makes an actor of it.

    Args:
        address: where the run listens.
        token: the run's secret.
        number: the host's.
        niceness: of the run; Ray's workers have a higher one.
    """

    def __init__(self, address: str, token: str, number: int, niceness: int) -> None:
        self._niceness = niceness
        self._address = address
        self._token = token
        self._number = number
        self._processes: dict[int, LocalProcess] = {}
        self._saying = threading.Lock()
        self._control: Channel

    def serve(self) -> None:
        """Do what the run says until it is gone; then end all processes and return."""
        os.environ[TOKEN_VARIABLE] = self._token  # `spawn` hands it on
        with suppress(PermissionError):  # where the cluster was started by root; else as Ray has it
            os.setpriority(os.PRIO_PROCESS, 0, self._niceness)
        try:
            with self._connect(-1) as self._control:
                self._loop()
        except TransferError:  # the run is gone
            return
        finally:
            self._end_all()

    def _loop(self) -> None:
        clock = Clock()
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while not clock.silent():
            if self._control.pending or poll.poll(BEAT_SECONDS * 1000):
                message: ToHost = receive(self._control, ToHost, Deadline(SILENCE_SECONDS))  # type: ignore[arg-type]
                clock.heard = time.monotonic()
                if isinstance(message, Spawn):
                    self._spawn(message)
                elif isinstance(message, Signal) and message.number in self._processes:
                    process = self._processes[message.number]
                    if not process.ended:
                        process.signal(message.signal, group=message.group)
            if clock.due():
                self._say(Beat())

    def _connect(self, process: int) -> Channel:
        deadline = Deadline(_CONNECT_SECONDS)
        channel = connect(self._address, self._token.encode(), THE_RUN, deadline)
        send(channel, Hello(self._number, process), deadline)
        return channel

    def _spawn(self, order: Spawn) -> None:
        read, write = os.pipe() if order.stream else (-1, os.open(order.log or os.devnull, os.O_WRONLY | os.O_APPEND))
        try:
            with self._connect(order.number).detach() as sock:
                sock.setblocking(True)
                process = LocalProcess(spawn(self._program(order), sock, write))
        except (OSError, RlctlError, subprocess.SubprocessError) as error:
            if read >= 0:
                os.close(read)
            self._say(Refused(order.number, str(error) or type(error).__name__))
            return
        finally:
            os.close(write)
        self._processes[order.number] = process
        self._say(Started(order.number, process.pid))
        threading.Thread(target=self._attend, args=(order.number, process, read), daemon=True).start()

    def _program(self, order: Spawn) -> Program:
        env = {**order.env, **shown(order.kind, order.devices, os.environ)}
        if not order.whole:
            env = {**_own(os.environ), **env}
        folder = order.folder if Path(order.folder).is_dir() else None
        return Program(order.target, order.name, sys.path if order.path is None else order.path, env, folder)

    def _attend(self, number: int, process: LocalProcess, read: int) -> None:
        """Send what a process prints, and at last that it has ended."""
        pump = threading.Thread(target=self._pump, args=(number, read), daemon=True)
        if read >= 0:
            pump.start()
        process.wait(math.inf)
        if read >= 0:
            pump.join(_DRAIN_SECONDS)
        with suppress(TransferError):  # the run is gone: `serve` ends
            self._say(Ended(number, process.returncode))

    def _pump(self, number: int, read: int) -> None:
        with open(read, "rb", buffering=0) as pipe, suppress(TransferError):
            while data := pipe.read(_CHUNK):
                self._say(Output(number, data))

    def _say(self, message: FromHost) -> None:
        with self._saying:
            send(self._control, message, Deadline(SILENCE_SECONDS))

    def _end_all(self) -> None:
        for process in self._processes.values():
            if not process.ended:
                process.signal(signal.SIGKILL, group=True)


def _own(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the host's own environment, without what Ray has put there."""
    return {name: value for name, value in environ.items() if not name.startswith(_RAYS_OWN)}
