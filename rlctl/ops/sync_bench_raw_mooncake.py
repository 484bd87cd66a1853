"""Mooncake's Transfer Engine driven with nothing around it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from rlctl.sync.backends.mooncake_transport import Piece, Transport, ranges_of

_TIMEOUT = 120.0


class RawMooncake:
    """All tensors of a receiver in one batched write, straight into them; all memory registered once. That a receiver
    has everything is one byte over a unix socket. The library runs with the settings that rlctl gives it.

    Args:
        rank, world: of this process.
        meeting: a file, not there yet, through which the ranks find each other.
    """

    def __init__(self, rank: int, world: int, meeting: str) -> None:
        self._transport = Transport("127.0.0.1")
        self._transport.gate.open()
        self._batches: list[tuple[str, list[Piece]]] = []
        self._peers: list[socket.socket] = []
        if rank == 0:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.settimeout(_TIMEOUT)
                listener.bind(meeting)
                listener.listen(world)
                self._peers = [listener.accept()[0] for _ in range(world - 1)]
        else:
            self._peers = [_connected(meeting)]
        for peer in self._peers:
            peer.settimeout(_TIMEOUT)

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See RawTransport."""
        if not self._batches:
            self._transport.register(ranges_of(weights.values()))
            for peer in self._peers:
                told = json.loads(peer.makefile("rb").readline())
                pieces = [
                    Piece(t.data_ptr(), address, t.nbytes)
                    for t, address in zip(weights.values(), told["addresses"], strict=True)
                    if t.nbytes
                ]
                self._batches.append((told["segment"], pieces))
        with ThreadPoolExecutor(len(self._batches)) as pool:
            came = list(pool.map(lambda batch: self._transport.write(*batch), self._batches))
        assert all(came)
        for peer in self._peers:
            peer.sendall(b".")

    def receive(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See RawTransport."""
        (sender,) = self._peers
        if not self._batches:
            self._transport.register(ranges_of(weights.values()))
            addresses = [tensor.data_ptr() for tensor in weights.values()]
            told = json.dumps({"segment": self._transport.segment, "addresses": addresses})
            sender.sendall(told.encode() + b"\n")
            self._batches.append(("", []))
        assert sender.recv(1) == b"."


def _connected(meeting: str) -> socket.socket:
    end = time.monotonic() + _TIMEOUT
    sock = socket.socket(socket.AF_UNIX)
    while time.monotonic() < end:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            sock.connect(meeting)
            return sock
        time.sleep(0.005)
    raise TimeoutError("trainer 0 did not come")
