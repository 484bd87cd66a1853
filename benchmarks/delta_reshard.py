"""What a switch with deltas moves after AdamW steps at a small rate, against a full one. Exits 1 when it is too much.

    PYTHONPATH=. python benchmarks/delta_reshard.py

Shapes of Qwen2-1.5B, as many of its layers as asked for and its whole vocabulary. Eight gloo processes hold random fp32
masters off the bf16 grid, as FSDP has them, and are switched with ``delta=True`` before the first step of AdamW and
after each; gradients are random. Every generation shard is compared with the masters of all ranks cast to bf16, bit for
bit; bytes are those of all ranks.

AdamW works element by element: masters after a step are made a million elements at a time, from their beginning, so
that no moments have to be kept beside them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from rlctl.hybrid.reshard.resharder import Resharder
from rlctl.keys.presets import preset
from rlctl.sync.boxes import Box, sizes, slices
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.placement import Cluster
from rlctl.sync.plan import Plan, best_placement
from rlctl.sync.weights import Weight, model_weights

Tensors = dict[str, torch.Tensor]
CHUNK = 1 << 20
LIMIT = 0.05
fsdp, vllm = ParallelLayout.fsdp, ParallelLayout.vllm
LAYOUTS = {
    "FSDP 8 -> TP 2": (fsdp(8), vllm(tp=2)),
    "FSDP 8 -> 4 x TP 2": (fsdp(8), vllm(tp=2, replicas=4)),
}


@dataclass(frozen=True)
class Task:
    """What all ranks do.

    Attributes:
        plan: from the training layout to the generation layout.
        steps: of AdamW; ``lr``: its rate.
        expected: the weights whole, in bf16, in shared memory: every rank writes its part after each step.
    """

    plan: Plan
    steps: int
    lr: float
    expected: Tensors


def boxes(plan: Plan, rank: int) -> dict[str, Box]:
    """The part of each weight that a trainer rank holds."""
    shares = ((w.name, share) for w in plan.weights for share in plan.train.shares(w))
    return {name: share.box for name, share in shares if rank in share.ranks}


def masters(task: Task, rank: int, steps: int) -> Tensors:
    """A rank's masters after so many steps."""
    names = [weight.name for weight in task.plan.weights]
    found: Tensors = {}
    for name, box in boxes(task.plan, rank).items():
        g = torch.Generator().manual_seed(1000 * names.index(name) + rank)
        master = torch.empty(sizes(box))
        for part in master.view(-1).split(CHUNK):
            parameter = torch.nn.Parameter(0.02 * torch.randn(part.shape, generator=g))
            seed = int(torch.randint(1 << 60, (1,), generator=g))
            optimizer = torch.optim.AdamW([parameter], lr=task.lr)
            gradients = torch.Generator().manual_seed(seed)
            for _ in range(steps):
                parameter.grad = torch.randn(part.shape, generator=gradients)
                optimizer.step()
            part.copy_(parameter.detach())
        found[name] = master
    return found


def off_grid(held: Tensors) -> float:
    """Share of the masters that bf16 cannot hold."""
    off = sum(int((part != part.bfloat16().float()).sum()) for t in held.values() for part in t.view(-1).split(CHUNK))
    return off / sum(tensor.numel() for tensor in held.values())


def wrong(task: Task, place: int, shards: Tensors) -> Iterator[str]:
    """Names of the generation shards of which an element has other bits than the masters' in bf16."""
    for weight in task.plan.weights:
        for share in task.plan.rollout.shares(weight):
            if place in share.ranks:
                name, box = task.plan.rollout.local(weight, share.box, share.box)
                mine = shards[name][slices(box)].view(torch.int16)
                if not torch.equal(mine, task.expected[weight.name][slices(share.box)].view(torch.int16).view_as(mine)):
                    yield name


def work(rank: int, task: Task, store: str, results: object) -> None:
    """One process."""
    torch.set_num_threads(1)
    plan, world = task.plan, task.plan.train.ranks
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    resharder = Resharder(plan, None, deadline=600.0, delta=True)
    places = plan.placement.rollout
    place = places.index(plan.placement.train[rank]) if plan.placement.train[rank] in places else -1
    for step in range(task.steps + 1):
        held = masters(task, rank, step)
        for name, box in boxes(plan, rank).items():
            task.expected[name][slices(box)] = held[name].bfloat16()
        dist.barrier()
        cpu = time.process_time()
        switched = resharder.to_rollout(held, version=step)
        cpu = time.process_time() - cpu
        resharder.to_training()
        report = switched.report
        bad = list(wrong(task, place, switched.shards)) if place >= 0 else []
        told = (rank, step, report.sent_bytes, report.control_bytes, report.kept_bytes, cpu, off_grid(held), bad, pss())
        results.put(told)  # type: ignore[attr-defined]
        del held, switched
        dist.barrier()  # nobody writes what another still compares


def pss() -> int:
    """Bytes of memory of this process, each shared page divided by those who share it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def measure(name: str, weights: list[Weight], steps: int, lr: float) -> bool:
    """Print a layout's table; return whether the last step held."""
    train, rollout = LAYOUTS[name]
    plan = Plan(weights, train, rollout, best_placement(weights, train, rollout, Cluster(8), together=rollout.tp))
    expected = {weight.name: torch.empty(weight.shape, dtype=torch.bfloat16).share_memory_() for weight in weights}
    context = multiprocessing.get_context("forkserver")  # ranks share what torch takes
    context.set_forkserver_preload(["benchmarks.delta_reshard"])
    results, folder = context.SimpleQueue(), tempfile.mkdtemp()
    task = Task(plan, steps, lr, expected)
    try:
        ranks = multiprocessing.start_processes(
            work, (task, f"{folder}/store", results), train.ranks, join=False, start_method="forkserver"
        )
        told = [results.get() for _ in range(train.ranks * (steps + 1))]
        while not ranks.join():
            pass
    finally:
        shutil.rmtree(folder)
    print(f"{name}: {plan.bytes_moved / 1e6:.1f} MB of a full switch are planned")
    full = 0
    for step in range(steps + 1):
        rows = [row for row in told if row[1] == step]
        sent, control, kept = (sum(row[field] for row in rows) for field in (2, 3, 4))
        full = full or sent
        memory = sum(row[8] for row in rows)
        most = max(row[4] for row in rows)
        print(
            f"  step {step}: {sent / 1e6:8.1f} MB sent, {sent / full:7.2%} of full, {control} bytes beside; "
            f"kept {kept / 1e6:.0f} MB, {most / 1e6:.0f} MB on the fullest rank; "
            f"CPU {sum(row[5] for row in rows):.1f} s; {memory / 1e9:.1f} GB of memory"
        )
    bad = sorted({name for row in told for name in row[7]})
    least = min(row[6] for row in told)
    held = not bad and full == plan.bytes_moved and sent <= LIMIT * full and all(row[4] for row in told)
    exact = f"not exact: {', '.join(bad[:5])}" if bad else "all shards exact"
    print(f"  {exact}; {least:.1%} of the masters off the bf16 grid; {'held' if held else 'NOT HELD'}", flush=True)
    return held


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2-1.5b")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--only", help="layouts whose name has this in it")
    arguments = parser.parse_args()
    every = model_weights(preset(arguments.model), "BF16")
    weights = [w for w in every if w.layer is None or w.layer < arguments.layers]
    size = sum(weight.nbytes for weight in weights)
    print(f"{arguments.model}, layers {arguments.layers}, {size / 1e6:.0f} MB in bf16; load {os.getloadavg()[0]:.1f}")
    chosen = [name for name in LAYOUTS if not arguments.only or arguments.only in name]
    held = [measure(name, weights, arguments.steps, arguments.lr) for name in chosen]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
