"""Mooncake's Transfer Engine in this process: its memory, its reads, and who may reach it.

The library listens on every interface whatever it is told, and serves whoever connects: its ports are behind a
``PortGate``. Over TCP there is one connection to each process that is read from (a lane), which stays.
"""

from __future__ import annotations

import bisect
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlctl.errors import UnavailableError
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import TransferError
from rlctl.sync.own_sockets import Address, called, end, ends, established, opened_by, own_sockets
from rlctl.sync.port_gate import PortGate

PIP = "pip install 'rlctl[mooncake]'"
APT = "apt-get install libibverbs1 librdmacm1 libnuma1"
# Read by the library when it is loaded, when it starts and later. One lane: strangers' connections can be told from it.
# Slices as large as buckets go faster. Its patience is longer than ours, and what goes wrong is told by us.
_SETTINGS = {
    "MC_TCP_LANES_PER_PEER": "1",
    "MC_TCP_SLICE_SIZE": str(64 << 20),
    "MC_TRANSFER_TIMEOUT": "86400",
    "MC_LOG_LEVEL": "ERROR",
}
_TAKE_UP = 5.0


class Piece(NamedTuple):
    """Bytes to be read: to where, from where, how many."""

    to: int
    out_of: int
    nbytes: int


class Transport:
    """One Transfer Engine.

    Args:
        host: address of this process for the others.
        protocol: ``tcp`` or ``rdma``.
        device: names of RDMA devices, comma between; empty: the library chooses.

    Attributes:
        segment: what others call this process.
        address: where bytes are read from over TCP.
        gate: at the library's ports.

    Raises:
        UnavailableError: the library, or what it needs, is missing.
    """

    def __init__(self, host: str, protocol: str = "tcp", device: str = "") -> None:
        require(protocol)
        self.host = host
        self.protocol = protocol
        self._callers: set[int] = set()
        self._registered: Counter[tuple[int, int]] = Counter()
        self._starts: list[tuple[int, int]] = []  # of what is registered, sorted: begin, end
        self._lock = threading.Lock()
        self._engine, sockets = opened_by(lambda: _started(host, protocol, device))
        self.gate = PortGate(sockets, str(socket.getaddrinfo(host, None)[0][4][0]))
        self._ports = {sock.getsockname()[1] for sock in sockets}
        rpc_port: int = self._engine.get_rpc_port()
        self.segment = f"{host}:{rpc_port}"
        self.address: Address = (host, next(iter(self._ports - {rpc_port}), 0))

    def register(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Let others read memory, and have the library know it: (address, bytes) of each. Return those that it takes;
        it takes none that overlaps another."""
        taken = []
        with self._lock:
            for address, nbytes in ranges:
                if self._registered[address, nbytes] or self._engine.register_memory(address, nbytes) == 0:
                    self._registered[address, nbytes] += 1
                    taken.append((address, nbytes))
            self._sort()
        return taken

    def unregister(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take back what ``register`` returned."""
        with self._lock:
            for key in ranges:
                self._registered[key] -= 1
                if not self._registered[key]:
                    del self._registered[key]
                    self._engine.unregister_memory(key[0])
            self._sort()

    def knows(self, address: int, nbytes: int) -> bool:
        """Whether all of this memory is registered."""
        place = bisect.bisect(self._starts, (address, 1 << 64)) - 1
        return place >= 0 and address + nbytes <= self._starts[place][1]

    def read(self, segment: str, pieces: Sequence[Piece]) -> bool:
        """Read from the registered memory of another process; return whether all of it came.

        The call cannot be interrupted, but ends at once when its connection does (``end_lane``).
        """
        to, out_of, nbytes = zip(*pieces, strict=True)
        return bool(self._engine.batch_transfer_sync_read(segment, list(to), list(out_of), list(nbytes)) == 0)

    def write(self, segment: str, pieces: Sequence[Piece]) -> bool:
        """Write ``nbytes`` at ``to`` of this process to ``out_of`` of another; return whether all of it went."""
        here, there, nbytes = zip(*pieces, strict=True)
        return bool(self._engine.batch_transfer_sync_write(segment, list(here), list(there), list(nbytes)) == 0)

    def lane(self, peer: Address) -> int:
        """Return the own port of the connection to the process whose data port this is, 0 when there is none."""
        for sock in own_sockets():
            with sock:
                found = ends(sock)
                if found is not None and found[1] == peer and found[0] != self.address and established(sock):
                    return found[0][1]
        return 0

    def end_lane(self, segment: str, address: Address) -> None:
        """End the connections to a process, also those that are being made: a read from it fails now."""
        host, _, port = segment.rpartition(":")
        peers = {address, (host, int(port))}
        for sock in own_sockets():
            with sock:
                found = ends(sock)
                if (found[1] if found is not None else called(sock)) in peers:
                    end(sock)

    def keep_only(self, ports: Iterable[int]) -> None:
        """End the connections of all who call this process, except of those with these ports at their end, and of those
        that were named before. The gate is shut. Raises TransferError when the library does not take connections up."""
        patience = Deadline(_TAKE_UP)
        while self.gate.waiting():
            if patience.over:
                raise TransferError("Mooncake's Transfer Engine takes no connections up")
            time.sleep(0.001)
        self._callers.update(ports)
        calling = set()
        for sock in own_sockets():
            with sock:
                found = ends(sock)
                if found is None or found[0][1] not in self._ports:
                    continue
                if found[1][1] in self._callers:
                    calling.add(found[1][1])
                else:
                    end(sock)
        self._callers = calling

    def _sort(self) -> None:
        self._starts = sorted((address, address + nbytes) for address, nbytes in self._registered)


@cache
def shared(host: str, protocol: str, device: str) -> Transport:
    """Return this process's Transport. There is one, for good: the library takes a second to end one."""
    return Transport(host, protocol, device)


def require(protocol: str) -> None:
    """Raise UnavailableError when the library or what it needs is missing."""
    _set_up()
    try:
        import mooncake.engine  # noqa: F401 - whether it loads
    except ModuleNotFoundError as error:
        raise UnavailableError("the package mooncake is not installed", fix=PIP) from error
    except ImportError as error:
        raise UnavailableError(f"Mooncake cannot be loaded: {error}", fix=APT) from error
    # Without a device the library takes TCP, and does not say so.
    if protocol == "rdma" and not any(Path("/sys/class/infiniband").glob("*")):
        raise UnavailableError("there is no RDMA device on this machine", fix="extras={'protocol': 'tcp'}")


def ranges_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the memory of tensors as (address, bytes), without overlaps, by address."""
    found: list[tuple[int, int]] = []
    storages = (t.untyped_storage() for t in tensors)
    for begin, stop in sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()}):
        if found and begin < found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((begin, stop))
    return [(begin, stop - begin) for begin, stop in found]


def _set_up() -> None:
    """Set the library's variables where the user has not."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def _started(host: str, protocol: str, device: str) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
        raise TransferError(f"Mooncake's Transfer Engine does not start on {host} with {protocol}")
    return engine
