"""Messages between a parent and its child."""

from __future__ import annotations

import errno
import math
import select
import socket
import struct
import time
from contextlib import suppress
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

ANY: type[Any] = cast("type[Any]", Any)
_FRAME = struct.Struct("<I")
_MAX_FRAME = 1 << 28


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds left. Raises TimeoutError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class Channel:
    """Messages over a stream socket: a 4-byte little-endian length, then msgpack.

    One thread at a time sends, and one at a time receives; those may be two.
    """

    def __init__(self, sock: socket.socket) -> None:
        # Every wait is a poll of its own: a timeout of the socket would be that of both directions.
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()

    def send(self, message: object, timeout: float) -> None:
        """Send ``message``. Raises TimeoutError, or OSError when the other side is gone."""
        body = msgspec.msgpack.encode(message)
        if len(body) > _MAX_FRAME:
            raise ValueError(f"a message of {len(body)} bytes is over the limit of {_MAX_FRAME}")
        deadline = Deadline(timeout)
        rest = memoryview(_FRAME.pack(len(body)) + body)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._await(select.POLLOUT, deadline)

    def receive(self, timeout: float, kind: type[T] = ANY) -> T:
        """Return the next message as a ``kind``.

        Args:
            timeout: seconds; ``math.inf`` is for a child that idles, whom its parent's end wakes.
            kind: what msgspec decodes to.

        Raises:
            TimeoutError: nothing whole arrived in time; what did is kept for the next call.
            EOFError: the other side is gone.
            msgspec.ValidationError: the message is not a ``kind``.
        """
        deadline = Deadline(timeout)
        (length,) = _FRAME.unpack(self._read(_FRAME.size, deadline)[: _FRAME.size])
        if length > _MAX_FRAME:
            raise EOFError(f"a frame announces {length} bytes: this is not a message of ours")
        frame = self._read(_FRAME.size + length, deadline)
        body = bytes(frame[_FRAME.size : _FRAME.size + length])
        del self._received[: _FRAME.size + length]
        return msgspec.msgpack.decode(body, type=kind)

    def fileno(self) -> int:
        """Return the descriptor, for waiting on several channels at once; see ``pending`` first."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether a message, or a part of one, has been read already."""
        return bool(self._received)

    def close(self) -> None:
        """Close this end; the other side reads an end of file, and so does a thread of this side that waits."""
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int, deadline: Deadline) -> bytearray:
        while len(self._received) < size:
            try:
                data = self._socket.recv(max(65536, size - len(self._received)))
            except BlockingIOError:
                self._await(select.POLLIN, deadline)
                continue
            if not data:
                raise EOFError("the other side closed the channel")
            self._received += data
        return self._received

    def _await(self, event: int, deadline: Deadline) -> None:
        left = deadline.remaining()
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise OSError(errno.EBADF, "the channel is closed")
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(None if math.isinf(left) else math.ceil(left * 1000)):
            raise TimeoutError
