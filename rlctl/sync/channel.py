"""Framed messages between two processes, with a deadline on every wait. What is in a frame is the caller's business.

A connection begins with a handshake in which both sides prove that they know the run's token (HMAC-SHA256 over the
other's nonce); the token itself is never sent.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from rlctl.sync.addresses import parse, reachable, same_user
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError, PeerLostError, TransferError
from rlctl.sync.handshake import HANDSHAKE_SECONDS, prove
from rlctl.sync.own_sockets import OPENING

MAX_FRAME = 64 << 20
_LENGTH = struct.Struct("<I")
_READ = 64 << 10  # bytes taken by one system call: many small frames at once
_ONE_FD = socket.CMSG_SPACE(array.array("i").itemsize)


class Channel:
    """One connection.

    Args:
        sock: a connected stream socket; it belongs to the channel from now on.
        peer: what errors call the other side.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self.peer = peer
        self.meanwhile: Callable[[], None] | None = None  # what to do every millisecond of a wait on it
        self._received = bytearray()
        self._fds: deque[int] = deque()
        # Every wait is a poll of our own: what is there already takes one system call, not two.
        sock.setblocking(False)
        self._polls: dict[int, select.poll] = {}
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def pair(cls, left: str = "left", right: str = "right") -> tuple[Channel, Channel]:
        """Return two joined channels of this machine, for a child process; each argument names one end's own side."""
        a, b = socket.socketpair()
        return cls(a, right), cls(b, left)

    def fileno(self) -> int:
        """Return the socket's file, so that a selector can wait on it."""
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        """Whether this side has closed it."""
        return self._sock.fileno() < 0

    def ended(self) -> bool:
        """Whether the other side has closed the connection and everything it sent has been read."""
        if self._received:
            return False
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def send(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """Send one frame. Raises DeadlineError, PeerLostError."""
        assert len(data) <= MAX_FRAME
        frame = _LENGTH.pack(len(data)) + data
        sent = self._send_some(frame, deadline)
        while sent < len(frame):
            sent += self._send_some(memoryview(frame)[sent:], deadline)

    @property
    def pending(self) -> bool:
        """Whether bytes of a next frame are here already; ``fileno`` need not become readable then."""
        return bool(self._received)

    def receive(self, deadline: Deadline, *, limit: int = MAX_FRAME) -> bytes:
        """Return the next frame. Raises DeadlineError, PeerLostError, CorruptedError (a frame beyond ``limit``)."""
        if not self._received:
            data = self._read(0, deadline)
            if len(data) >= _LENGTH.size and _LENGTH.unpack_from(data)[0] == len(data) - _LENGTH.size <= limit:
                return data[_LENGTH.size :]  # one whole frame, as between processes that take turns
            self._received += data
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > limit:
            raise CorruptedError(f"{self.peer} announced a message of {length} bytes, more than {limit}")
        return self._exactly(length, deadline)

    def send_fd(self, fd: int, deadline: Deadline) -> None:
        """Hand an open file to the other side (unix sockets only)."""
        while True:
            try:
                socket.send_fds(self._sock, [b"F"], [fd])
                return
            except BlockingIOError:
                self._await(select.POLLOUT, "handing a file to", deadline)
            except ConnectionError as error:
                raise self._lost() from error

    def receive_fd(self, deadline: Deadline) -> int:
        """Return an open file that the other side handed over; it belongs to the caller."""
        self._exactly(1, deadline)
        if not self._fds:
            raise CorruptedError(f"{self.peer} sent no file where one was due")
        return self._fds.popleft()

    def end_waits(self) -> None:
        """Have both sides' waits on this connection end now, with PeerLostError; may be called from another thread."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def detach(self) -> socket.socket:
        """Return the socket, for another use, and leave it; nothing unread was received on it."""
        assert not self._received
        return socket.socket(fileno=self._sock.detach())

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_some(self, data: bytes | memoryview, deadline: Deadline) -> int:
        while True:
            try:
                return self._sock.send(data)
            except BlockingIOError:
                self._await(select.POLLOUT, "sending to", deadline)
            except ConnectionError as error:
                raise self._lost() from error

    def _exactly(self, count: int, deadline: Deadline) -> bytes:
        while len(self._received) < count:
            self._received += self._read(count - len(self._received), deadline)
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    def _read(self, least: int, deadline: Deadline) -> bytes:
        while True:
            try:
                # Files arrive with the bytes they were sent with; a plain read would drop them.
                data, extra, _, _ = self._sock.recvmsg(max(_READ, least), _ONE_FD)
                break
            except BlockingIOError:
                self._await(select.POLLIN, "waiting for", deadline)
            except ConnectionError as error:
                raise self._lost() from error
        if not data:
            raise self._lost()
        for level, kind, content in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                for fd in array.array("i", content):
                    os.set_inheritable(fd, False)
                    self._fds.append(fd)
        return data

    def _await(self, event: int, what: str, deadline: Deadline) -> None:
        poll = self._polls.get(event)
        if poll is None:
            poll = self._polls[event] = select.poll()
            poll.register(self._sock, event)
        while not poll.poll(deadline.milliseconds if self.meanwhile is None else 1):
            if self.meanwhile is None or deadline.over:
                raise deadline.error(f"{what} {self.peer}")
            self.meanwhile()

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"{self.peer} is gone: its connection closed")


class Listener:
    """Waits for peers that know the token.

    Args:
        address: ``unix:PATH`` (made with mode 0600, removed on close), ``unix:@NAME`` (no file, so nothing is left of a
            process that was killed; other users are refused) or ``tcp:HOST:PORT``; port 0 takes a free one.
        token: the run's secret.
    """

    def __init__(self, address: str, token: bytes) -> None:
        self._token = token
        family, target = parse(address)
        self._path: Path | None = None
        self._sock = socket.socket(family)
        if isinstance(target, str) and target.startswith("\0"):
            self._sock.bind(target)
            self.address = address
        elif isinstance(target, str):
            os.fchmod(self._sock.fileno(), 0o600)  # Linux gives the socket's mode to the file that bind makes
            with reachable(target) as short:
                self._sock.bind(short)
            self._path = Path(target)
            self.address = address
        else:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(target)
            self.address = "tcp:{}:{}".format(*self._sock.getsockname())
        with OPENING:
            self._sock.listen()
        self._accepting = threading.Lock()
        self.refused = 0

    def accept(
        self,
        peer: str,
        deadline: Deadline,
        *,
        handshake: Deadline | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> Channel:
        """Return the next connection whose other side knows the token; others are closed, counted in ``refused``, and
        ``on_refused`` is called. Who has come in time may prove it until ``handshake`` is over."""
        what = f"waiting for {peer} to connect"
        while True:
            try:
                with self._accepting:
                    self._sock.settimeout(deadline.socket_timeout(what))
                    sock, _ = self._sock.accept()
            except TimeoutError as error:
                raise deadline.error(what) from error
            channel = Channel(sock, peer)
            try:
                if not same_user(sock):
                    raise CorruptedError(f"{peer} is another user's process")
                prove(
                    channel, self._token, b"listener", b"connector", (handshake or deadline).within(HANDSHAKE_SECONDS)
                )
            except TransferError:
                self.refused += 1
                channel.close()
                on_refused()
                continue
            return channel

    def fileno(self) -> int:
        """Return the socket's file, so that a selector can wait on it."""
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._sock.fileno() < 0

    def close(self) -> None:
        """Stop listening; an ``accept`` that waits in another thread ends with OSError."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._accepting:  # else the file's number could be a new socket's, and that be accepted from
            self._sock.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def connect(address: str, token: bytes, peer: str, deadline: Deadline) -> Channel:
    """Return a channel to the listener at ``address``. Raises PeerLostError (refused), DeadlineError."""
    family, target = parse(address)
    sock = socket.socket(family)
    what = f"connecting to {peer}"
    try:
        sock.settimeout(deadline.socket_timeout(what))
        with reachable(target) as short:
            sock.connect(short)
    except TimeoutError as error:
        sock.close()
        raise deadline.error(what) from error
    except (ConnectionError, FileNotFoundError) as error:
        sock.close()
        raise PeerLostError(f"{peer} does not listen at {address}") from error
    channel = Channel(sock, peer)
    try:
        prove(channel, token, b"connector", b"listener", deadline.within(HANDSHAKE_SECONDS))
    except TransferError as error:
        channel.close()
        raise PeerLostError(
            f"{peer} at {address} refused the connection", fix="is the run's token the same?"
        ) from error
    return channel
