"""Members that can be looked into: their memory and their sockets."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed

from rlctl.process import Channel
from rlctl.sync.engine import CheckpointEngine, TransferStats
from rlctl.sync.host import serve_host
from rlctl.sync.member import MemberHost


class ProbedHost(MemberHost):
    """A member that says what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self._aside: list[CheckpointEngine | None] = []

    def start_probe(self) -> int:
        """Return the resident memory in bytes, and measure its peak from now on."""
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests left in the allocator is nobody's memory
        Path("/proc/self/clear_refs").write_text("5")
        return psutil.Process().memory_info().rss

    def peak(self) -> int:
        """Return the most resident memory since then, in bytes."""
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) << 10

    def send_in_step(self, version: int, meeting: str) -> TransferStats:
        """Send the weights as ranks that hold shards do: each tensor comes out of a gather, in which all take part."""
        store = torch.distributed.FileStore(meeting, self.engine.member.world)  # type: ignore[attr-defined]
        deadline = self.engine.deadline

        def gathered() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.weights.items():
                store.add(name, 1)
                while store.add(name, 0) < self.engine.member.world:
                    deadline.check(f"{self.engine.member}: the gather of {name}")
                    time.sleep(0.002)
                yield name, tensor

        return self.engine.send_weights(gathered(), version)

    def set_aside(self) -> None:
        """Keep the engine as it is, open, in the midst of a sync perhaps; another takes its place."""
        self._aside.append(self._engine)
        self._engine = None

    def step(self) -> None:
        """Change some of every weight in place."""
        for tensor in self.weights.values():
            tensor.view(torch.int16)[:: 1 << 10] += 1

    def pause(self, seconds: float) -> None:
        """Be busy."""
        time.sleep(seconds)

    def scribble(self, name: str) -> None:
        """Flip a bit of what deltas are made from: of a rollout member's weights, of a trainer's copy."""
        if self.engine.member.role == "rollout":
            self.weights[name].view(torch.int16)[3, 5] ^= 1
            return
        assert self.engine.encoder is not None
        tensor = dict(self.engine.encoder.weights())[name]
        tensor.view(torch.int16)[3, 5] ^= 1

    def sockets(self) -> list[tuple[str, int, bool]]:
        """Return the local address and port of every internet socket, and whether it listens."""
        found = psutil.Process().net_connections("inet")
        return [(c.laddr.ip.removeprefix("::ffff:"), c.laddr.port, c.status == psutil.CONN_LISTEN) for c in found]


def big(seed: int) -> dict[str, torch.Tensor]:
    """200 MiB of bfloat16: 15 layers of 8 MiB with a small tensor each, and one of 80 MiB."""
    sizes = {"embedding": 80 << 20}
    for i in range(15):
        sizes |= {f"{i}.weight": 8 << 20, f"{i}.norm": 2048}
    return {n: torch.arange(seed, seed + s // 8).view(torch.bfloat16) for n, s in sizes.items()}


def large_and_small(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of 20 MiB, far more than a few small buckets and a socket hold, and small ones after each."""
    g = torch.Generator().manual_seed(seed)
    sizes = {f"{i}.{kind}": s for i in range(3) for kind, s in (("weight", 20 << 20), ("bias", 1000))}
    return {n: torch.randint(0, 256, (s,), generator=g, dtype=torch.uint8) for n, s in sizes.items()}


def serve(channel: Channel) -> None:
    """Entry point."""
    serve_host(channel, ProbedHost())
