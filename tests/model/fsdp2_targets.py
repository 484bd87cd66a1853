"""What the ranks in the tests of FSDP2 can do besides training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec

from rlctl.process import Channel
from rlctl.runtime.ranks.messages import RankSetup
from rlctl.runtime.ranks.rank import OPERATIONS, Rank, serve


def main(channel: Channel) -> None:
    serve(channel, {**OPERATIONS, "rebuild": rebuild, "gradients": gradients, "copies": copies, "hurry": hurry,
                    "sleep": sleep, "raise": fail, "largest": largest, "slices": slices})  # fmt: skip


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


def slices(rank: Rank) -> dict[str, int]:
    """Compare what this rank would send to a replica of two ranks, out of its shards, with the whole weights."""
    import json
    from pathlib import Path

    import torch

    from rlctl.keys.model_spec import ModelSpec
    from rlctl.sync import boxes
    from rlctl.sync.layout import ParallelLayout
    from rlctl.sync.slicing import Layouts, slice_name

    engine, shards, place = rank.engine, rank.engine.shards, rank.setup.rank
    spec = ModelSpec.from_config(json.loads((Path(rank.setup.source) / "config.json").read_text()))
    train = ParallelLayout.fsdp(shards.size, tp=shards.tp_size, whole_vocab=True)
    layouts = Layouts.of_model(spec, train, ParallelLayout.vllm(tp=2), dtype="F32")
    whole = {name: tensor.clone() for name, tensor in engine.per_tensor_params()}
    streams = layouts.sources(place, dict(engine.local_params()))
    sent = {part: dict(stream) for part, stream in streams.items()}
    for t in layouts.plan.transfers(src=place):
        due = whole[t.tensor][boxes.slices(t.box)]
        assert torch.equal(sent[t.dst].pop(slice_name(t.tensor, t.box)), due), (t.tensor, t.box)
    assert not any(sent.values())
    return {"here": sum(t.nbytes for t in layouts.plan.transfers(src=place)), "all": layouts.plan.bytes_moved,
            "whole": sum(w.nbytes for w in layouts.weights)}  # fmt: skip


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
