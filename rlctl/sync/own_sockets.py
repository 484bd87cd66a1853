"""The internet sockets of this process, also those that a library keeps to itself."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

Address = tuple[str, int]
T = TypeVar("T")
# Held by whoever begins to listen.
OPENING = threading.Lock()
_ESTABLISHED, _SYN_SENT = 1, 2  # linux/tcp_states.h


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


def opened_by(make: Callable[[], T]) -> tuple[T, list[socket.socket]]:
    """Return what ``make`` makes, and duplicates, the caller's to close, of the internet sockets that listen since.

    Libraries do not say which theirs are. rlctl's own listeners keep out of the way by ``OPENING``.
    """
    with OPENING:
        before = set()
        for sock in _listening():
            with sock:
                before.add(_inode(sock))
        made = make()
        new = []
        for sock in _listening():
            if _inode(sock) in before:
                sock.close()
            else:
                new.append(sock)
        return made, new


def _listening() -> Iterator[socket.socket]:
    for sock in own_sockets():
        if listens(sock):
            yield sock
        else:
            sock.close()


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def listens(sock: socket.socket) -> bool:
    """Whether a socket waits for connections."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def ends(sock: socket.socket) -> tuple[Address, Address] | None:
    """Return (address, port) of a connection's two ends, its own first; None when it is not connected."""
    try:
        return _plain(sock.getsockname()), _plain(sock.getpeername())
    except OSError:
        return None


def called(sock: socket.socket) -> Address | None:
    """Return whom a socket is connecting to, without an answer so far; else None."""
    if sock.type != socket.SOCK_STREAM or _state(sock) != _SYN_SENT:
        return None
    inode = str(os.fstat(sock.fileno()).st_ino)
    for table in ("tcp", "tcp6"):  # what getpeername does not say yet
        for line in Path("/proc/self/net", table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[9] == inode:
                address, _, port = fields[2].partition(":")
                return _plain((_readable(address), int(port, 16)))
    return None


def established(sock: socket.socket) -> bool:
    """Whether neither side has ended a connection."""
    return _state(sock) == _ESTABLISHED


def end(sock: socket.socket) -> None:
    """End a connection: whatever waits for it on either side fails now."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side was faster
        return


def _plain(name: tuple[str, int]) -> Address:
    return name[0].removeprefix("::ffff:"), name[1]  # an address of IPv4 at a socket of IPv6


def _state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _readable(address: str) -> str:
    """Return an address out of /proc/net/tcp: words of four bytes in the machine's order, as hex."""
    words = [int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
