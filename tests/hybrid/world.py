"""Ranks in processes of their own over gloo, which run functions of the tests by name; they are started once a file."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from rlctl.process import Channel, Child, start

TIMEOUT = 120.0


class World:
    """Ranks 0 .. size-1 of one process group.

    Args:
        size: how many.
        folder: where they meet, and where their output goes.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.children: list[Child] = []
        for rank in range(size):
            child = start(
                "tests.hybrid.world:serve", name=f"rank-{rank}", timeout=TIMEOUT, output=folder / f"rank-{rank}.log"
            )
            self.children.append(child)
        for rank, child in enumerate(self.children):
            child.channel.send([rank, size, str(folder / "store")], TIMEOUT)

    def call(self, function: str, *, timeout: float = TIMEOUT, **arguments: Any) -> list[Any]:
        """Run ``module:function`` on every rank; return the results in their order, or fail with all errors."""
        self.begin(function, **arguments)
        found = [child.answer(timeout) for child in self.children]
        faults = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(found) if error]
        assert not faults, "\n".join(faults)
        return [result for _, result in found]

    def begin(self, function: str, **arguments: Any) -> None:
        for child in self.children:
            child.channel.send([function, arguments], TIMEOUT)

    def close(self) -> None:
        for child in self.children:
            child.kill()


@contextmanager
def world(size: int, folder: Path) -> Iterator[World]:
    """Ranks for the time of a block."""
    started = World(size, folder)
    try:
        yield started
    finally:
        started.close()


def serve(channel: Channel) -> None:
    """Do as the test says, on one rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size, store = channel.receive(TIMEOUT)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )
    while True:
        function, arguments = channel.receive(math.inf)
        module, _, name = function.partition(":")
        try:
            answer = ["", getattr(import_module(module), name)(**arguments)]
        except Exception:  # noqa: BLE001 - the test shows it
            answer = [traceback.format_exc(), None]
        channel.send(answer, TIMEOUT)
