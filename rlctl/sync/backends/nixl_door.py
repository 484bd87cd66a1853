"""The door of a NIXL agent: UCX serves whoever connects to its port, and asks for no token.

So the port is shut by a filter in the kernel, but for the moments in which a peer that proved the run's token connects.
Those connections stay; every other that was made meanwhile is ended.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from rlctl.sync.own_sockets import end, ends, opened_by, own_sockets
from rlctl.sync.port_gate import PortGate

T = TypeVar("T")


class Door:
    """The listening sockets of one agent; shut at first.

    Args:
        sockets: duplicates of them; they belong to the door from now on.

    Attributes:
        ports: that they listen on.
    """

    def __init__(self, sockets: Collection[socket.socket]) -> None:
        self._sockets = sockets
        self.ports = {int(sock.getsockname()[1]) for sock in sockets}
        self._gates = [PortGate([sock], sock.getsockname()[0]) for sock in sockets]
        self._callers = set(ports_to(self.ports))  # the agent calls itself when it is made

    def open(self) -> None:
        """Let connections in."""
        for gate in self._gates:
            gate.open()

    def admit(self, ports: Iterable[int]) -> None:
        """Say from which ports those call who may."""
        self._callers.update(ports)

    def shut(self) -> None:
        """Let no further connection in, and end those of all who were not admitted."""
        for gate in self._gates:
            gate.shut()
        calls = self._calls()
        for sock, caller in calls:
            if caller not in self._callers:
                end(sock)
            sock.close()
        self._callers &= {caller for _, caller in calls} | set(ports_to(self.ports))

    def close(self) -> None:
        """Let the sockets go."""
        for sock in self._sockets:
            sock.close()

    def _calls(self) -> list[tuple[socket.socket, int]]:
        found = []
        for sock in own_sockets():
            both = ends(sock)
            if both is not None and both[0][1] in self.ports:
                found.append((sock, both[1][1]))
            else:
                sock.close()
        return found


def with_door(make: Callable[[], T]) -> tuple[T, Door]:
    """Return what ``make`` makes, and the door to the sockets that listen since."""
    made, sockets = opened_by(make)
    return made, Door(sockets)


def ports_to(ports: Collection[int]) -> list[int]:
    """Return the own ports of this process's connections to one of ``ports``."""
    found = []
    for sock in own_sockets():
        with sock:
            both = ends(sock)
            if both is not None and both[1][1] in ports:
                found.append(both[0][1])
    return found
