"""Addresses that members listen at, and who may come there."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from rlctl.errors import UsageError

_ROOT = 0
_LONGEST_PATH = 107  # bytes in a sockaddr_un, without the zero at the end
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): process, user, group


def parse(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Return the family and target of ``unix:PATH``, ``unix:@NAME`` or ``tcp:HOST:PORT``. Raises UsageError."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return socket.AF_UNIX, f"\0{rest[1:]}" if rest.startswith("@") else rest
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdigit():
        raise UsageError(f"{address!r} is not an address", fix="unix:PATH, unix:@NAME or tcp:HOST:PORT")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host.strip("[]"), int(port))


def own_address(interface: str) -> str:
    """Return this machine's address (IPv4, or the first) on an interface; what names no interface is an address."""
    found = psutil.net_if_addrs().get(interface, [])
    inet = [a.address for a in found if a.family == socket.AF_INET]
    other = [a.address for a in found if a.family == socket.AF_INET6]
    return next(iter([*inet, *other]), interface)


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a connection is this user's, or on another node: what the mode 0600
    does for a socket that is a file."""
    if sock.family != socket.AF_UNIX:
        return True
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user in (os.geteuid(), _ROOT)


@contextmanager
def reachable(target: str | tuple[str, int]) -> Iterator[str | tuple[str, int]]:
    """Give what ``bind`` and ``connect`` take for ``target``: the path of a unix socket has at most 107 bytes, and a
    job's TMPDIR may be longer, so such a path goes by its folder's open file."""
    if not isinstance(target, str) or target.startswith("\0") or len(os.fsencode(target)) <= _LONGEST_PATH:
        yield target
        return
    folder, name = os.path.split(target)
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{number}/{name}"
    finally:
        os.close(number)
