"""What a run and its hosts say to each other. A host starts processes on its node for the run."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec

from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline

T = TypeVar("T")

# Each side says something this often; one that has said nothing this long is gone, or its node is.
BEAT_SECONDS, SILENCE_SECONDS = 1.0, 15.0


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who connects: a host (``process`` -1), or a process that it starts. ``host`` is another number for each host
    that is ever made."""

    host: int
    process: int


class Spawn(msgspec.Struct, tag="spawn", array_like=True):
    """Start a process.

    Attributes:
        number: its number.
        target: ``module:function``.
        name: what ``ps`` calls it.
        env: environment; the host's own is under it, unless ``whole``.
        whole: ``env`` is all of it, for a host on the run's machine.
        kind: of device.
        devices: those that it sees, counted among the host's.
        path: its ``sys.path``; None for the host's.
        folder: its working directory, where there is one of that name.
        log: file on the host's node that what it prints is appended to; empty for none.
        stream: whether what it prints is sent instead.
    """

    number: int
    target: str
    name: str
    env: dict[str, str]
    whole: bool
    kind: str
    devices: list[int]
    path: list[str] | None
    folder: str
    log: str
    stream: bool


class Signal(msgspec.Struct, tag="signal", array_like=True):
    """Send a signal to a process, or to its group."""

    number: int
    signal: int
    group: bool


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """I am here."""


class Started(msgspec.Struct, tag="started", array_like=True):
    """A process runs."""

    number: int
    pid: int


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """A process could not be started."""

    number: int
    reason: str


class Output(msgspec.Struct, tag="output", array_like=True):
    """What a process printed."""

    number: int
    data: bytes


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """A process has ended; all that it printed has been sent."""

    number: int
    returncode: int


ToHost = Spawn | Signal | Beat
FromHost = Started | Refused | Output | Ended | Beat


def receive(channel: Channel, kind: type[T], deadline: Deadline) -> T:
    """Return the next message as a ``kind``. Raises TransferError, msgspec.ValidationError."""
    return msgspec.msgpack.decode(channel.receive(deadline), type=kind)


def send(channel: Channel, message: Any, deadline: Deadline) -> None:
    """Send a message. Raises TransferError."""
    channel.send(msgspec.msgpack.encode(message), deadline)


class Clock:
    """When something was last said, and last heard."""

    def __init__(self) -> None:
        self.said = self.heard = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to say something, and note that it is said."""
        now = time.monotonic()
        if now - self.said < BEAT_SECONDS:
            return False
        self.said = now
        return True

    def silent(self) -> bool:
        """Whether the other side is gone."""
        return time.monotonic() - self.heard > SILENCE_SECONDS
