"""What the ranks in the tests of a reshard do."""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlctl.hybrid.reshard.errors import ReshardError
from rlctl.hybrid.reshard.resharder import Resharder
from rlctl.keys.dtypes import torch_dtype
from rlctl.sync.boxes import slices
from rlctl.sync.layout import Layout
from rlctl.sync.plan import Plan
from rlctl.sync.weights import Weight
from tests.hybrid.reshard import counted
from tests.sync.wire_cases import random_tensor

KEPT: dict[str, Any] = {}
Tensors = dict[str, torch.Tensor]


def meet(rank: int, size: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    counted.register()
    dist.init_process_group(
        "counted", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )


def whole(weights: list[Weight], seed: int, dtype: torch.dtype | None = None) -> Tensors:
    """The unsharded model: random bits, or random numbers of ``dtype``."""
    g = torch.Generator().manual_seed(seed)
    if dtype is None:
        return {w.name: random_tensor(w.shape, torch_dtype(w.dtype), g) for w in weights}
    return {w.name: torch.randn(w.shape, generator=g).to(dtype) for w in weights}


def held_by(weights: list[Weight], layout: Layout, rank: int, full: Tensors) -> Tensors:
    """What a trainer's rank keeps."""
    return {
        weight.name: full[weight.name][slices(share.box)].clone()
        for weight in weights
        for share in layout.shares(weight)
        if rank in share.ranks
    }


def due_to(weights: list[Weight], layout: Layout, rank: int, full: Tensors) -> Tensors:
    """What a rollout's rank must end with: its parts of the unsharded model, each where the layout says."""
    found: Tensors = {}
    for weight in weights:
        for share in layout.shares(weight):
            if rank in share.ranks:
                name, box = layout.local(weight, share.box, share.box)
                part = full[weight.name][slices(share.box)].to(torch_dtype(weight.dtype))
                _grow(found, name, tuple(high for _, high in box), part.dtype)[slices(box)].view(part.shape).copy_(part)
    return found


def _grow(found: Tensors, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    before = found.get(name, torch.zeros([0] * len(shape), dtype=dtype))
    grown = torch.zeros([max(a, b) for a, b in zip(before.shape, shape, strict=True)], dtype=dtype)
    grown[tuple(slice(0, n) for n in before.shape)] = before
    found[name] = grown
    return grown


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(kind), b.view(kind))


def strided(due: Tensors) -> Tensors:
    """Memory to fill: every second tensor is every second column of a wider one."""
    found: Tensors = {}
    for number, (name, tensor) in enumerate(sorted(due.items())):
        *rows, columns = tensor.shape
        apart = number % 2 == 0
        found[name] = torch.empty([*rows, (1 + apart) * columns], dtype=tensor.dtype)[..., :: 1 + apart]
    return found


def lacking(plan: Plan, rank: int) -> int:
    """Bytes of what a rollout rank wants and its device does not hold, element by element."""
    device = plan.placement.rollout[rank]
    own = plan.placement.train.index(device) if device in plan.placement.train else -1
    total = 0
    for weight in plan.weights:
        want, held = (torch.zeros(weight.shape, dtype=torch.bool) for _ in range(2))
        for mask, layout, who in ((want, plan.rollout, rank), (held, plan.train, own)):
            for share in layout.shares(weight):
                if who in share.ranks:
                    mask[slices(share.box)] = True
        total += int((want & ~held).sum()) * weight.nbytes // weight.elements
    return total


def switch(plan: Plan, seed: int, dtype: str | None = None, *, fill: bool = False, **options: Any) -> dict[str, Any]:
    """Carry out a plan, and say what came of it. ``fill``: memory that is not all contiguous."""
    counted.reset()
    rank = dist.get_rank()
    weights = list(plan.weights)
    full = whole(weights, seed, None if dtype is None else getattr(torch, dtype))
    held = held_by(weights, plan.train, plan.placement.train.index(rank), full) if rank in plan.placement.train else {}
    before = {name: tensor.clone() for name, tensor in held.items()}
    resharder = Resharder(plan, None, deadline=30.0, **options)
    place = plan.placement.rollout.index(rank) if rank in plan.placement.rollout else -1
    due = due_to(weights, plan.rollout, place, full) if place >= 0 else {}
    switched = resharder.to_rollout(held, version=1, into=strided(due) if fill else None)
    wrong = [name for name in due if name not in switched.shards or not same_bits(due[name], switched.shards[name])]
    moved = [name for name in held if not same_bits(held[name], before[name])]
    again = resharder.to_rollout(held, version=1)
    collectives = sum(group.collectives for group in counted.MADE)
    return {
        "wrong": wrong, "odd": sorted(set(switched.shards) ^ set(due)), "moved": moved, "report": switched.report,
        "counted": dict(counted.all_pairs()), "collectives": collectives, "again": again.report.total_bytes,
        "lacking": lacking(plan, place) if place >= 0 else 0,
        "wanted": sum(tensor.nbytes for tensor in switched.shards.values()),
    }  # fmt: skip


def warm_up(plan: Plan, **options: Any) -> None:
    """Make a switch, and be ready for others."""
    rank = dist.get_rank()
    held = held_by(list(plan.weights), plan.train, rank, whole(list(plan.weights), 0))
    KEPT["resharder"] = Resharder(plan, None, **options)
    KEPT["held"] = held
    KEPT["resharder"].to_rollout(held)


def send_buffers() -> list[int]:
    """Sizes of the send buffers of this process's connections to others of this host."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own descriptor, or a socket that listens
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                with socket.socket(fileno=os.dup(int(entry.name))) as end:
                    if end.family == socket.AF_INET and end.getpeername()[0] == end.getsockname()[0]:
                        found.append(end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
    return found


def switch_again(stop_in: str | None = None, how: signal.Signals | None = None) -> tuple[dict[int, str], str, float]:
    """Switch; return whom the error names, what it says and after how long it came."""
    resharder: Resharder = KEPT["resharder"]
    enter = resharder._watch.enter

    def stop(phase: str, *, waits: bool = False) -> None:
        enter(phase, waits=waits)
        if phase == stop_in and how is not None:
            os.kill(os.getpid(), how)

    resharder._watch.enter = stop  # type: ignore[method-assign]
    begin = time.monotonic()
    try:
        resharder.to_rollout(KEPT["held"])
    except ReshardError as error:
        return error.ranks, str(error), time.monotonic() - begin
    return {}, "", time.monotonic() - begin


def drift(plan: Plan, seed: int, share: float) -> dict[str, Any]:
    """Switch four times with deltas; between, the same random share of all elements changes on all holders."""
    counted.reset()
    rank, weights = dist.get_rank(), list(plan.weights)
    full = whole(weights, seed, torch.float32)
    g = torch.Generator().manual_seed(seed + 1)
    resharder = Resharder(plan, None, deadline=30.0, delta=True, bucket_nbytes=1 << 20)
    reports, wrong = [], list[str]()
    for _ in range(4):
        switched = resharder.to_rollout(held_by(weights, plan.train, rank, full))
        reports.append(switched.report)
        due = due_to(weights, plan.rollout, plan.placement.rollout.index(rank), full)
        wrong += [name for name in due if not same_bits(due[name], switched.shards[name])]
        resharder.to_training()
        for tensor in full.values():
            mask = torch.rand(tensor.shape, generator=g) < share
            tensor[mask] = torch.randn(int(mask.sum()), generator=g)
    held = held_by(weights, plan.train, rank, full)
    kept = sum(shard.nbytes for shard in switched.shards.values()) + sum(tensor.nbytes for tensor in held.values()) // 2
    return {"wrong": wrong, "reports": reports, "kept": kept, "counted": dict(counted.all_pairs())}


def train(plan: Plan, seed: int, steps: int, lr: float) -> dict[str, Any]:
    """Switch with deltas before and after each step of AdamW on this rank's fp32 shards."""
    rank, weights = dist.get_rank(), list(plan.weights)
    g = torch.Generator().manual_seed(seed)
    full = {w.name: 0.02 * torch.randn(w.shape, generator=g) for w in weights}
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in full.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr)
    resharder = Resharder(plan, None, deadline=30.0, delta=True)
    reports, wrong = [], list[str]()
    for _ in range(steps + 1):
        now = {name: parameter.detach() for name, parameter in parameters.items()}
        switched = resharder.to_rollout(held_by(weights, plan.train, rank, now))
        reports.append(switched.report)
        due = due_to(weights, plan.rollout, plan.placement.rollout.index(rank), now)
        wrong += [name for name in due if not same_bits(due[name], switched.shards[name])]
        resharder.to_training()
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=g)
        optimizer.step()
    return {"wrong": wrong, "reports": reports}
