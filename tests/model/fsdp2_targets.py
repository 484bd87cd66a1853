"""What the ranks in the tests of FSDP2 can do besides training."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec

from rlctl.process import Channel
from rlctl.runtime.ranks.messages import RankSetup, Report
from rlctl.runtime.ranks.rank import OPERATIONS, Rank, serve


def main(channel: Channel) -> None:
    serve(channel, {**OPERATIONS, "rebuild": rebuild, "gradients": gradients, "copies": copies, "hurry": hurry,
                    "sleep": sleep, "raise": fail, "largest": largest})  # fmt: skip


def idle(channel: Channel) -> None:
    """A rank without a model."""
    channel.receive(60.0)
    channel.send(Report("done"), 10.0)
    while True:
        channel.receive(math.inf)
        channel.send(Report("done"), 10.0)


def rebuild(rank: Rank, **changes: Any) -> None:
    """Begin again with another setup."""
    rank.setup = msgspec.convert({**msgspec.to_builtins(rank.setup), **changes}, RankSetup)
    rank.model = rank.load()
    rank.engine = rank.build()


def gradients(rank: Rank, loss: dict[str, Any], rate: float) -> None:
    """Hand out the gradient of the rows, and the parameters after a step of SGD."""
    import torch

    from rlctl.model.base import LossSpec
    from rlctl.model.fsdp2.shards import local_of

    rows, rank.rows = rank.rows, []
    engine, shards = rank.engine, rank.engine.shards
    engine.accumulate(rows, msgspec.convert(loss, LossSpec))

    def found() -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, parameter in shards.parameters.items():
            assert parameter.grad is not None, name
            yield "gradient", name, shards.gather(name, local_of(parameter.grad))
        torch.optim.SGD(shards.parameters.values(), lr=rate, foreach=False).step()
        for name in shards.names():
            yield "stepped", name, shards.gather(name, shards.local(name))

    rank.send_tensors(found())


def copies(rank: Rank) -> dict[str, bool]:
    """Say of each parameter that tensor parallelism leaves whole whether its copies are equal bit for bit."""
    import torch
    import torch.distributed as dist

    shards, equal = rank.engine.shards, {}
    for name in shards.names():
        part = shards.local(name).contiguous()
        if shards._tensor_dim(name) is not None:
            continue
        parts = [torch.empty_like(part) for _ in range(shards.tp_size)]
        dist.all_gather(parts, part, group=shards.mesh.get_group("tp"))
        equal[name] = all(torch.equal(parts[0], other) for other in parts)
    return equal


def largest(rank: Rank) -> dict[str, int]:
    """Say how many elements of parameters lie here."""
    shards = rank.engine.shards
    return {"here": sum(part.numel() for part in shards.locals()), "bytes": sum(
        part.untyped_storage().nbytes() for part in shards.locals())}  # fmt: skip


def hurry(rank: Rank, seconds: float) -> None:
    """Wait for others in collectives no longer than this."""
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def sleep(rank: Rank, who: int, seconds: float) -> None:
    """Keep the others waiting in a collective."""
    if rank.setup.rank == who:
        time.sleep(seconds)
    rank.engine.params_digest()


def fail(rank: Rank, who: int) -> None:
    """Fail on one rank; the others wait for it."""
    if rank.setup.rank == who:
        raise ZeroDivisionError("nothing to divide by")
    rank.engine.params_digest()
