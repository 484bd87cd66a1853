"""The connection between the two hosts of a sync bench: who may speak, which version, and what is said.

The listening side has the trainers and asks; the connecting side has the rollout workers and answers. A request is
``[number, kind, body]``, an answer ``[number, result, error]``; answers come in any order.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from rlctl import __version__
from rlctl.errors import RlctlError, UsageError
from rlctl.sync.channel import Channel, Listener, connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import CorruptedError, DeadlineError, PeerLostError
from rlctl.units import format_duration

PING_SECONDS = 5.0
# The listening side pings and is answered; one that is silent for so long has gone, or its host has.
SILENCE_SECONDS = 60.0
_HELLO_SECONDS = 20.0
_RETRY_SECONDS = 0.5


class Request(msgspec.Struct, array_like=True):
    """What the listening side wants; ``kind``: survey, open, do, cancel, close, ping, bye."""

    number: int
    kind: str
    body: dict[str, Any] = {}


class Answer(msgspec.Struct, array_like=True):
    """What the connecting side says to it."""

    number: int
    result: Any = None
    error: ErrorData | None = None


class Hello(msgspec.Struct, array_like=True):
    """The first frame of either side."""

    rlctl: str
    nonce: str = ""


@dataclass(frozen=True)
class Address:
    """Where the listening side listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def channel(self) -> str:
        """As ``sync.channel`` writes it."""
        return f"tcp:{self}"


def parse_address(text: str, *, where: str) -> Address:
    """Return HOST:PORT, ``[IPv6]:PORT``, or loopback for ``:PORT`` and ``PORT``. Raises UsageError."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address", where=where, fix="HOST:PORT, such as 10.0.0.7:5555")
    return Address(host, int(port))


def listen(address: Address, token: bytes) -> Listener:
    """Return what listens there. Raises UsageError when that is not possible."""
    try:
        return Listener(address.channel, token)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {address}: {error.strerror}",
            where="--listen",
            fix="an address of this host, a free port",
        ) from error


def accept(listener: Listener, wait: float, on_refused: Callable[[], None]) -> Channel:
    """Return the connection of the first peer that knows the token.

    Args:
        listener: whose port the others connect to.
        wait: seconds.
        on_refused: called for each that does not know it.

    Raises:
        RlctlError: nobody came.
        UsageError: it is another version of rlctl.
    """
    try:
        channel = listener.accept("the other host", Deadline(wait), on_refused=on_refused)
    except DeadlineError as error:
        raise RlctlError(
            f"no other host came within {format_duration(wait)}",
            where="--listen",
            fix="start rlctl sync-bench --connect there; --wait says how long this side waits",
        ) from error
    keep_alive(channel)
    return channel


def reach(address: Address, token: bytes, wait: float) -> Channel:
    """Return a connection to the listening side; where nobody listens yet, try again.

    Raises:
        UsageError: another token, or a name that is not known.
        RlctlError: nobody listens within ``wait`` seconds.
    """
    deadline, reason = Deadline(wait), ""
    while True:
        try:
            channel = connect(address.channel, token, f"the host at {address}", deadline)
            keep_alive(channel)
            return channel
        except (PeerLostError, DeadlineError, OSError) as error:
            _require_retry(error, address)
            if not isinstance(error, DeadlineError) or not reason:
                reason = str(error.strerror) if isinstance(error, OSError) else error.message
            if deadline.over:
                raise RlctlError(
                    f"no sync bench within {format_duration(wait)}: {reason}",
                    where="--connect",
                    fix="start rlctl sync-bench --listen there first; --wait says how long this side tries",
                ) from error
        time.sleep(min(_RETRY_SECONDS, deadline.remaining))


def _require_retry(error: PeerLostError | DeadlineError | OSError, address: Address) -> None:
    """Raise what ends the attempts, if ``error`` does."""
    cause = error.__cause__
    if isinstance(cause, CorruptedError):
        raise UsageError(
            f"the host at {address} has another token",
            where="--connect",
            fix="both sides need the same --token-file, or the same variable",
        ) from error
    if isinstance(error, socket.gaierror):
        raise UsageError(f"{address.host}: {error.strerror}", where="--connect") from error
    if isinstance(error, PeerLostError) and not isinstance(cause, ConnectionError):
        raise RlctlError(f"what listens at {address} is no sync bench, or it has its peer already") from error


def greet(channel: Channel, nonce: str = "") -> str:
    """Tell the version, hear the other's, and return the nonce of the listening side.

    Raises UsageError when the versions differ.
    """
    deadline = Deadline(_HELLO_SECONDS)
    channel.send(msgspec.msgpack.encode(Hello(__version__, nonce)), deadline)
    try:
        other = msgspec.msgpack.decode(channel.receive(deadline, limit=1024), type=Hello)
    except msgspec.DecodeError as error:
        raise CorruptedError(f"{channel.peer} does not greet as rlctl does") from error
    if other.rlctl != __version__:
        raise UsageError(
            f"this is rlctl {__version__}, and {channel.peer} runs rlctl {other.rlctl}",
            fix="install the same version on both hosts",
        )
    return nonce or other.nonce


def keep_alive(channel: Channel) -> None:
    """Have the system notice that the other host is gone, also when it could not say so."""
    with _options_of(channel) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def own_host(channel: Channel) -> str:
    """Return this side's address on the connection: where the other host can reach it."""
    with _options_of(channel) as sock:
        return str(sock.getsockname()[0])


def _options_of(channel: Channel) -> socket.socket:
    """Return a second handle of the channel's socket, to be closed: options belong to both."""
    return socket.socket(fileno=os.dup(channel.fileno()))


def end(channel: Channel) -> None:
    """End a connection that other threads may wait on."""
    channel.end_waits()
    with suppress(OSError):
        channel.close()
