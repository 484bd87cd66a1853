"""The internet sockets of this process, also those that a library keeps to itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

Address = tuple[str, int]


def own_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every internet socket of this process; it is the caller's to close."""
    for number in _open_sockets():  # all of them before the first duplicate, which would be found, too
        try:
            found = socket.socket(fileno=os.dup(number))
        except OSError:  # closed meanwhile
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6):
            yield found
        else:
            found.close()


def _open_sockets() -> list[int]:
    numbers = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(entry.readlink()).startswith("socket:"):
                numbers.append(int(entry.name))
    return numbers


def listens(sock: socket.socket) -> bool:
    """Whether a socket waits for connections."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def ends(sock: socket.socket) -> tuple[Address, Address] | None:
    """Return (address, port) of a connection's two ends, its own first; None when it is not connected."""
    try:
        return _plain(sock.getsockname()), _plain(sock.getpeername())
    except OSError:
        return None


def established(sock: socket.socket) -> bool:
    """Whether neither side has ended a connection."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1  # TCP_ESTABLISHED of linux/tcp_states.h


def end(sock: socket.socket) -> None:
    """End a connection: whatever waits for it on either side fails now."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side was faster
        return


def _plain(name: tuple[str, int]) -> Address:
    return name[0].removeprefix("::ffff:"), name[1]  # an address of IPv4 at a socket of IPv6
