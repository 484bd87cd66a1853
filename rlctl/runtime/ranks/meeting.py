"""Where trainer ranks find each other: a file without a name on one machine, a store over TCP on several."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_TCP = "tcp:"


class Meeting(Protocol):
    """The run's side; it lasts as long as the ranks do."""

    store: str  # what a rank is told

    def close(self) -> None:
        """End it. Harmless when repeated."""


class FileMeeting:
    """Of ranks on this machine. Nothing is left of it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("rlctl-trainer-ranks")
        self.store = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class TcpMeeting:
    """Of ranks on several machines.

    Args:
        host: the address of this machine that all of them reach; it listens there alone.
    """

    def __init__(self, host: str) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.bind((host, 0))
        sock.listen()
        port = sock.getsockname()[1]
        self.store = f"{_TCP}{host}:{port}"
        self._server: Any = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach(), use_libuv=False
        )

    def close(self) -> None:
        self._server = None


def store_of(told: str, world: int, timeout: float) -> Store:
    """Return a rank's store.

    Args:
        told: the ``store`` of the run's side.
        world: how many ranks meet.
        timeout: longest wait, in seconds.
    """
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    if not told.startswith(_TCP):
        return FileStore(told, world)
    host, _, port = told.removeprefix(_TCP).rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout))
