"""A gate at listening sockets that a library opens on every interface, whatever it is told, and to everybody.

The kernel asks a small program at the socket (a classic BPF filter) whether a packet may come in; no privilege is
needed. Shut, nobody can connect. Open, only who calls the one address that is meant. Connections that were made while
it was open stay.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable, Sequence

_SO_ATTACH_FILTER = 26  # linux/socket.h
_NET = 0xFFF00000  # SKF_NET_OFF of linux/filter.h: offsets count from the header of IP
_LOAD_BYTE, _LOAD_WORD, _AND, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_TAKE, _DROP = 0xFFFFFFFF, 0
_DESTINATION = {4: 16, 6: 24}  # where the address of the receiver is in the header of IPv4, of IPv6

Instruction = tuple[int, int, int, int]


class PortGate:
    """The gate at some listening sockets of this process; it is shut at first.

    Args:
        sockets: duplicates of them; they belong to the gate from now on.
        host: the address that may be called while the gate is open.
    """

    def __init__(self, sockets: Sequence[socket.socket], host: str) -> None:
        self._sockets = sockets
        self._admitting = _only(host)
        self.shut()

    def open(self) -> None:
        """Let connections to the address in."""
        self._attach(self._admitting)

    def shut(self) -> None:
        """Let no further connection in."""
        self._attach([(_RETURN, 0, 0, _DROP)])

    def waiting(self) -> int:
        """Return how many connections the library has not taken up yet: they are not among this process's sockets."""
        # Of a listening socket, tcpi_unacked (linux/tcp.h) is the length of that queue.
        lengths = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)[24:] for s in self._sockets]
        return sum(int.from_bytes(length, sys.byteorder) for length in lengths)

    def _attach(self, program: Iterable[Instruction]) -> None:
        code = [struct.pack("HBBI", *instruction) for instruction in program]
        memory = ctypes.create_string_buffer(b"".join(code))
        described = struct.pack("@HP", len(code), ctypes.addressof(memory))
        for sock in self._sockets:
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


def _only(host: str) -> list[Instruction]:
    """Return the program that takes packets to ``host`` and no others."""
    address = ipaddress.ip_address(host)
    words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
    left = 2 * len(words)  # instructions from here to the drop at the end
    program = [(_LOAD_BYTE, 0, 0, _NET), (_AND, 0, 0, 0xF0), (_IF_EQUAL, 0, left + 1, address.version << 4)]
    for number, word in enumerate(words):
        left -= 2
        program += [
            (_LOAD_WORD, 0, 0, _NET + _DESTINATION[address.version] + 4 * number),
            (_IF_EQUAL, 0, left + 1, word),
        ]
    return [*program, (_RETURN, 0, 0, _TAKE), (_RETURN, 0, 0, _DROP)]
