"""One gloo group whose waits can be ended.

gloo's calls cannot be interrupted, but they end at once when their connections do; so a group knows its sockets.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import PeerLostError, TransferError
from rlctl.sync.rendezvous import MeetingStore
from rlctl.sync.work import Work

_Gloo: Any = torch.distributed.ProcessGroupGloo  # torch does not say what it has


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
        before = set(_listening())
        device = _Gloo.create_device(hostname=host)
        port = next(iter(set(_listening()) - before))[1]
        store.set(f"port/{rank}", str(port))
        options = _Gloo._Options()  # noqa: SLF001 - the only way to bind a group to an address
        options._devices = [device]  # noqa: SLF001
        options._timeout = timedelta(seconds=max(deadline.remaining, 0.001))  # noqa: SLF001
        what = f"connecting {peers[rank]} to {', '.join(p for i, p in enumerate(peers) if i != rank)}"
        try:
            self._group = _Gloo(store, rank, len(peers), options)
            self._ports = {int(store.get(f"port/{r}")) for r in range(len(peers))}
        except RuntimeError as error:
            raise _translated(error, what, deadline) from error
        self._others = ", ".join(p for i, p in enumerate(peers) if i != rank)

    def broadcast(self, tensor: torch.Tensor, deadline: Deadline, what: str) -> Work[None]:
        """Begin to send (rank 0) or receive (others) a contiguous CPU tensor. ``what`` is for the error."""
        what = f"{what} ({self._others})"
        deadline.check(what)
        if self._group is None:
            raise PeerLostError(f"{what}: the group was ended")
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=deadline.remaining)
        try:
            return _Broadcast(self._group.broadcast([tensor], options), tensor, what)
        except RuntimeError as error:
            raise _translated(error, what, deadline) from error

    def end_waits(self) -> None:
        """Close every connection of the group: whatever waits on either side fails now."""
        for connection in _connections():
            with connection:
                ports = {connection.getsockname()[1], connection.getpeername()[1]}
                if ports & self._ports:
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the group."""
        self.end_waits()
        self._group = None


class _Broadcast:
    def __init__(self, work: torch.distributed.Work, tensor: torch.Tensor, what: str) -> None:
        self._work = work
        self._tensor = tensor  # alive until it is through
        self._what = what

    def wait(self, deadline: Deadline) -> None:
        """See Work."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _translated(error, self._what, deadline) from error


def _translated(error: RuntimeError, what: str, deadline: Deadline) -> TransferError:
    if deadline.over or "imed out" in str(error):
        return deadline.error(what)
    return PeerLostError(f"{what}: the connection closed after {deadline.elapsed:.1f} s")


def _sockets() -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()).startswith("socket:"):
                found = socket.socket(fileno=os.dup(int(entry.name)))
            else:
                continue
        except OSError:  # closed meanwhile
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6):
            yield found
        else:
            found.close()


def _listening() -> Iterator[tuple[str, int]]:
    for found in _sockets():
        with found:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield found.getsockname()[:2]


def _connections() -> Iterator[socket.socket]:
    for found in _sockets():
        try:
            found.getpeername()
        except OSError:
            found.close()
            continue
        yield found
