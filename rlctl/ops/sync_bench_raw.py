"""Transport libraries driven with nothing around them: what an engine of rlctl on the same library is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

_Gloo: Any = torch.distributed.ProcessGroupGloo  # torch does not say what it has
_TIMEOUT = timedelta(seconds=120)

#: Backend -> ``module:Class`` of a ``sync_bench_member.RawTransport``.
RAW: Mapping[str, str] = MappingProxyType(
    {
        "gloo": "rlctl.ops.sync_bench_raw:RawGloo",
        "mooncake": "rlctl.ops.sync_bench_raw_mooncake:RawMooncake",
        "nixl": "rlctl.ops.sync_bench_raw_nixl:RawNixl",
    }
)


class RawGloo:
    """Each tensor broadcast by itself, all of them at once: the fastest plain use of gloo that we know of.

    Args:
        rank, world: of this process.
        meeting: a file, not there yet, through which the ranks find each other.
    """

    def __init__(self, rank: int, world: int, meeting: str) -> None:
        options = _Gloo._Options()  # noqa: SLF001 - the only way to bind a group to an address
        options._devices = [_Gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        options._timeout = _TIMEOUT  # noqa: SLF001
        self._group = _Gloo(FileStore(meeting, world), rank, world, options)

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See RawTransport."""
        self._broadcast(weights)

    def receive(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See RawTransport."""
        self._broadcast(weights)

    def _broadcast(self, weights: Mapping[str, torch.Tensor]) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        options.timeout = _TIMEOUT
        works = [
            self._group.broadcast([tensor.view(-1).view(torch.uint8)], options)
            for tensor in weights.values()
            if tensor.numel()
        ]
        for work in works:
            work.wait()
