"""Bytes of weights on their way, counted around whatever process groups a rank has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_GATHERS = [name for name in ("_allgather_base", "all_gather_single") if hasattr(dist.ProcessGroup, name)]


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """Yield a list to which the bytes of each send, and of each gather of a block, are added."""
    counted: list[int] = []
    before = {name: getattr(dist.ProcessGroup, name) for name in ("send", *_GATHERS)}
    bound = {name: vars(dist.ProcessGroup)[name] for name in before}  # as the class has them: they bind

    def send(group: Any, tensors: list[Any], *rest: Any, **more: Any) -> Any:
        counted.append(sum(tensor.nbytes for tensor in tensors))
        return before["send"](group, tensors, *rest, **more)

    def gather(name: str) -> Any:
        def call(group: Any, output: Any, given: Any, *rest: Any, **more: Any) -> Any:
            counted.append(given.nbytes * (group.size() - 1))
            return before[name](group, output, given, *rest, **more)

        return call

    try:
        dist.ProcessGroup.send = send
        for name in _GATHERS:
            setattr(dist.ProcessGroup, name, gather(name))
        yield counted
    finally:
        for name, call in bound.items():
            setattr(dist.ProcessGroup, name, call)
