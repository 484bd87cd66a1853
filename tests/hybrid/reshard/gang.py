"""Real ranks of a gloo group, forked from a server that has torch already: importing it costs more than any test."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

RANKS = "tests.hybrid.reshard.ranks"


class Gang:
    """``size`` processes that are ranks of one group; a context manager that ends them.

    Args:
        store: file that they meet by.
    """

    def __init__(self, size: int, store: Path, *, timeout: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([RANKS])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, rank, size, str(store), timeout), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of its processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill()
            process.join(10)
            pipe.close()

    def begin(self, function: str, *, ranks: Sequence[int] | None = None, **arguments: Any) -> None:
        """Have all ranks, or some, call a function of ``ranks``."""
        for rank in range(len(self._pipes)) if ranks is None else ranks:
            self._pipes[rank].send((function, arguments))

    def answer(self, rank: int, timeout: float = 60.0) -> Any:
        """Return what a rank's call returned, or raise the error that it raised."""
        good, value = self.outcome(rank, timeout)
        if not good:
            raise value
        return value

    def outcome(self, rank: int, timeout: float = 40.0) -> tuple[bool, Any]:
        """Return whether a rank's call returned, and what it returned or raised."""
        assert self._pipes[rank].poll(timeout), f"rank {rank} said nothing for {timeout} s"
        good, value = self._pipes[rank].recv()
        return good, value

    def call(self, function: str, **arguments: Any) -> list[Any]:
        """Have all ranks call a function of ``ranks``; return what each returned."""
        self.begin(function, **arguments)
        found = [self.outcome(rank) for rank in range(len(self._pipes))]
        for good, value in found:
            if not good:
                raise value
        return [value for _, value in found]

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a rank's process a signal."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)


def serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    """Do what the test asks, until it ends this process."""
    from tests.hybrid.reshard import ranks

    ranks.meet(rank, size, store, timeout)
    while True:
        function, arguments = pipe.recv()
        try:
            answer = True, getattr(ranks, function)(**arguments)
        except Exception as error:  # noqa: BLE001 - the test gets it
            answer = False, error
        pipe.send(answer)
