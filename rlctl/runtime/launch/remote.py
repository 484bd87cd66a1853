"""The run's side of a host: its processes, each a ``Child`` like any other."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from rlctl.process import Channel as ChildChannel
from rlctl.process import Child, ChildDied, describe_exit
from rlctl.runtime.launch.desk import Desk
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
from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError, TransferError


class RemoteProcess:
    """A process of a host; a Running.

    Args:
        number: its number at the host.
        link: the host.
        output: what the host sends of what it prints is written there.
    """

    def __init__(self, number: int, link: HostLink, output: BinaryIO | None) -> None:
        self.number = number
        self.socket: socket.socket | None = None
        self._link = link
        self._output = output
        self._pid = -1
        self._started = threading.Event()
        self._over = threading.Event()
        self._ending = ""

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def ended(self) -> bool:
        return self._over.is_set() or bool(self._link.lost)

    def wait(self, seconds: float) -> bool:
        return self._over.wait(seconds) or self.ended

    def signal(self, number: int, *, group: bool) -> None:
        self._link.tell(Signal(self.number, number, group))

    def ending(self) -> str:
        return self._ending or self._link.lost

    def wait_started(self, name: str, deadline: Deadline) -> None:
        """Wait until it runs. Raises ChildDied: it will not; DeadlineError."""
        if not self._started.wait(deadline.remaining):
            raise deadline.error(f"starting {name}")
        if self._pid < 0:
            raise ChildDied(name, self._ending)

    def take(self, message: Started | Refused | Output | Ended) -> None:
        """Note what the host says of it."""
        match message:
            case Started():
                self._pid = message.pid
                self._started.set()
            case Refused():
                self.end(message.reason)
            case Output() if self._output is not None:
                self._output.write(message.data)
            case Ended():
                self.end(describe_exit(message.returncode))

    def end(self, how: str) -> None:
        """Note how it ended."""
        if self._over.is_set():
            return
        self._ending = how
        self._over.set()
        self._started.set()
        if self._output is not None:
            self._output.close()

    def hang_up(self) -> None:
        """Have waits for what it says end."""
        if self.socket is not None:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class HostLink:
    """A host, to the run: starts processes on its node.

    Args:
        channel: to the host.
        number: the host's.
        desk: where its processes connect.
        label: what messages call it.
        near: whether it is on the run's machine: its processes have the run's environment and folder then.
        carried: environment variables of the run that processes elsewhere get.
        why: asked, once the host is gone, how it ended.
    """

    def __init__(
        self,
        channel: Channel,
        number: int,
        desk: Desk,
        *,
        label: str,
        near: bool,
        carried: Mapping[str, str],
        why: Callable[[], str],
    ) -> None:
        self.lost = ""
        self._channel = channel
        self._number = number
        self._desk = desk
        self._label = label
        self._near = near
        self._carried = carried
        self._why = why
        self._processes: dict[int, RemoteProcess] = {}
        self._lock = threading.Lock()
        self._clock = Clock()
        self._closing = False
        self._thread = threading.Thread(target=self._read, name=f"rlctl-{label}", daemon=True)
        self._thread.start()

    def start(
        self,
        target: str,
        *,
        name: str,
        timeout: float,
        output: Path | None,
        env: Mapping[str, str],
        kind: str,
        devices: tuple[int, ...],
    ) -> Child:
        """Start a process that sees those devices of the host; see ``process.start`` for all else."""
        deadline = Deadline(timeout)
        sink, log = None, ""
        if output is not None and self._near:  # it writes there itself, and so to its last breath
            output.open("ab").close()
            log = str(output.absolute())
        elif output is not None:
            sink = output.open("ab", buffering=0)
        with self._lock:
            process = RemoteProcess(len(self._processes), self, sink)
            self._processes[process.number] = process
        if self.lost:
            process.end(self.lost)
        path = list(sys.path) if self._near else None
        every = {**(os.environ if self._near else {}), **self._carried, **env}
        self.tell(
            Spawn(process.number, target, name, every, self._near, kind, list(devices), path, str(Path.cwd()), log,
                  sink is not None)
        )  # fmt: skip
        try:
            process.wait_started(name, deadline)
            hello = Hello(self._number, process.number)
            process.socket = self._desk.take(hello, deadline, lambda: _unless_ended(name, process)).detach()
        except DeadlineError as error:
            process.signal(9, group=True)
            raise TimeoutError(str(error)) from error
        child = Child(name, process, ChildChannel(process.socket), output)
        return child.begin(deadline.remaining)

    def tell(self, message: ToHost) -> None:
        """Send the host something; nothing happens when it is gone."""
        with self._lock:
            if self.lost or self._channel.closed:
                return
            with suppress(TransferError):  # the reading thread finds out what is wrong
                send(self._channel, message, Deadline(SILENCE_SECONDS))

    def close(self) -> None:
        """Have the host end its processes and itself. Harmless when repeated."""
        self._closing = True
        self._channel.end_waits()
        self._thread.join()

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        how = f"said nothing for {SILENCE_SECONDS:g} s"
        try:
            while not self._clock.silent():
                if self._channel.pending or poll.poll(BEAT_SECONDS * 1000):
                    self._take()
                if self._clock.due():
                    self.tell(Beat())
        except (TransferError, msgspec.DecodeError):
            how = "ended" if self._closing else self._why()
        self._part(f"its host ({self._label}) {how}")

    def _take(self) -> None:
        message: FromHost = receive(self._channel, FromHost, Deadline(SILENCE_SECONDS))  # type: ignore[arg-type]
        self._clock.heard = time.monotonic()
        if not isinstance(message, Beat):
            self._processes[message.number].take(message)

    def _part(self, how: str) -> None:
        """Note that the host is gone, and its processes with it."""
        with self._lock:
            self.lost = how
            self._channel.close()
            processes = list(self._processes.values())
        for process in processes:
            process.end(how)
            process.hang_up()


def _unless_ended(name: str, process: RemoteProcess) -> None:
    if process.ended:
        raise ChildDied(name, process.ending())
