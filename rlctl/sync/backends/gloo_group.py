"""One gloo group whose waits can be ended.

gloo's calls cannot be interrupted, and a transfer that has not begun when its connection goes is only ended by its
timeout. So a group knows its sockets: it can close them under gloo, sees when the other side has, and a wait looks.
"""

from __future__ import annotations

import atexit
import ctypes
import select
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import PeerLostError, TransferError
from rlctl.sync.own_sockets import ends, opened_by, own_sockets
from rlctl.sync.rendezvous import MeetingStore
from rlctl.sync.work import Work

_Gloo: Any = torch.distributed.ProcessGroupGloo  # torch does not say what it has
# How often a wait looks whether its connections are still there, and how long what has arrived may take to be read.
_LOOK = timedelta(seconds=0.05)
_DRAIN_SECONDS = 0.5
# Ended groups, with what is stuck in them until its timeout (it touches no memory without a connection). A group's
# destructor would wait for that, and a process that exits while a thread of Python's is in it aborts.
_BURIED: list[tuple[Any, deque[torch.distributed.Work]]] = []


class GlooGroup:
    """Rank 0 broadcasts, the others receive.

    Args:
        store: where the ranks meet.
        rank: of this process.
        peers: what errors call each rank.
        host: address to bind to.
        deadline: for all ranks to come.
    """

    def __init__(self, store: MeetingStore, rank: int, peers: list[str], host: str, deadline: Deadline) -> None:
        device, port = _device(host)
        store.set(f"port/{rank}", str(port))
        options = _Gloo._Options()  # noqa: SLF001 - the only way to bind a group to an address
        options._devices = [device]  # noqa: SLF001
        options._timeout = timedelta(seconds=max(deadline.remaining, 0.001))  # noqa: SLF001
        self._others = ", ".join(p for i, p in enumerate(peers) if i != rank)
        what = f"connecting {peers[rank]} to {self._others}"
        try:
            self._group = _Gloo(store, rank, len(peers), options)
            ports = {int(store.get(f"port/{r}")) for r in range(len(peers))}
        except RuntimeError as error:
            raise _translated(error, what, deadline) from error
        self._connections = list(_connections(ports))
        self._works: deque[torch.distributed.Work] = deque()  # those that may be under way
        self._deadline: Deadline | None = None  # of the options
        self._broadcast = torch.distributed.BroadcastOptions()
        self.ended = False
        _sweep()

    def broadcast(self, tensor: torch.Tensor, deadline: Deadline, what: str) -> Work[None]:
        """Begin to send (rank 0) or receive (others) a contiguous CPU tensor. ``what`` is for the error."""
        what = f"{what} ({self._others})"
        deadline.check(what)
        if self.ended:
            raise PeerLostError(f"{what}: the group was ended")
        if self._deadline is not deadline:
            self._deadline, self._broadcast = deadline, torch.distributed.BroadcastOptions()
            self._broadcast.rootRank = 0
            self._broadcast.timeout = timedelta(seconds=deadline.remaining)
        try:
            work = self._group.broadcast([tensor], self._broadcast)
        except RuntimeError as error:
            raise _translated(error, what, deadline) from error
        while self._works and self._works[0].is_completed():
            self._works.popleft()
        self._works.append(work)
        return _Broadcast(self, work, tensor, what)

    def end_waits(self) -> None:
        """Close every connection of the group: whatever waits on either side fails soon."""
        self.ended = True
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other side was faster
                continue

    def left(self) -> bool:
        """Whether another rank has closed its connection."""
        poll = select.poll()
        for connection in self._connections:
            poll.register(connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """End the group."""
        self.end_waits()
        for connection in self._connections:
            connection.close()
        self._connections = []
        _bury(self._group, self._works)
        self._group, self._works = None, deque()


class _Broadcast:
    def __init__(self, group: GlooGroup, work: torch.distributed.Work, tensor: torch.Tensor, what: str) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor  # alive until it is through
        self._what = what

    def wait(self, deadline: Deadline) -> None:
        """See Work."""
        lost: Deadline | None = None
        while True:
            try:
                self._work.wait(_LOOK)
                return
            except RuntimeError as error:
                if self._work.is_completed():
                    self._result(deadline)
                    return
                if self._group.ended or (lost is not None and lost.over):
                    raise PeerLostError(
                        f"{self._what}: the connection closed after {deadline.elapsed:.1f} s"
                    ) from error
            deadline.check(self._what)
            if lost is None and self._group.left():
                lost = Deadline(_DRAIN_SECONDS)

    def _result(self, deadline: Deadline) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _translated(error, self._what, deadline) from error


def _bury(group: Any, works: deque[torch.distributed.Work]) -> None:
    _BURIED.append((group, works))
    _sweep()


def _sweep() -> None:
    """Let go the groups in which nothing is stuck any more."""
    for buried in list(_BURIED):
        if all(work.is_completed() for work in buried[1]):
            with suppress(ValueError):  # another thread was faster
                _BURIED.remove(buried)


@atexit.register
def _leave_buried() -> None:
    """Keep from destruction what the process would wait for at its exit, which ends it all."""
    for group, _ in _BURIED:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _device(host: str) -> tuple[Any, int]:
    """Open gloo's listening socket and say its port, which gloo does not."""
    while True:
        device, sockets = opened_by(lambda: _Gloo.create_device(hostname=host))
        ports = [sock.getsockname()[1] for sock in sockets]
        for sock in sockets:
            sock.close()
        if len(ports) == 1:
            return device, ports[0]
        # Another library began to listen meanwhile: once more.


def _translated(error: RuntimeError, what: str, deadline: Deadline) -> TransferError:
    if deadline.over or "imed out" in str(error):
        return deadline.error(what)
    return PeerLostError(f"{what}: the connection closed after {deadline.elapsed:.1f} s")


def _connections(ports: set[int]) -> Iterator[socket.socket]:
    """Yield the connections that one of the group's ports is an end of."""
    for found in own_sockets():
        connected = ends(found)
        if connected is not None and ports & {port for _, port in connected}:
            yield found
        else:
            found.close()
