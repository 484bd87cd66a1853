"""A switch of layouts in place, against gathering everything and slicing it, and against saving and loading.

    python benchmarks/switch.py --model qwen3-0.6b --layers 2 --repeat 5

Ranks are gloo processes that hold fp32 masters and want bf16 shards in fresh memory. The ways take turns, every shard
is compared bit for bit, wall seconds are those of the slowest rank, CPU seconds those of all ranks together. Two loads:
of what each rank saved, in which every rank finds the slices that it wants (the best that a file can do), and of a
checkpoint that rank 0 alone gathered and wrote, which every rank maps and slices, as engines load one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors import safe_open
from safetensors.torch import save_file

from rlctl.hybrid.reshard.resharder import Resharder
from rlctl.keys.presets import preset
from rlctl.sync.boxes import Box, sizes, slices
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.placement import Cluster
from rlctl.sync.plan import Plan, best_placement
from rlctl.sync.weights import Weight, model_weights

Tensors = dict[str, torch.Tensor]
# A layout that has taken so many seconds ends with the round after the least number of them, the warm-up left out.
LONGEST, LEAST = 40.0, 2
MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it
fsdp, vllm = ParallelLayout.fsdp, ParallelLayout.vllm
LAYOUTS = {
    "FSDP 2 -> TP 2": (fsdp(2), vllm(tp=2)),
    "FSDP 4 -> 2 x TP 2": (fsdp(4), vllm(tp=2, replicas=2)),
    "FSDP 4 -> TP 4": (fsdp(4), vllm(tp=4)),
    "TP 4 -> 2 x TP 2": (ParallelLayout(tp=4), ParallelLayout(tp=2, replicas=2)),
    "FSDP 8 -> 4 x TP 2": (fsdp(8), vllm(tp=2, replicas=4)),
}


class Rank:
    """One rank with its masters, and the ways to its generation shards."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.rank = dist.get_rank()
        self.place = plan.placement.rollout.index(self.rank)
        self.resharder = Resharder(plan, None, deadline=120.0)
        self.all_boxes = [self.boxes(plan.train, rank) for rank in range(dist.get_world_size())]
        self.transfers = list(plan.transfers(dst=self.place))
        self.held: Tensors = {}
        self.due: Tensors = {}
        g = torch.Generator().manual_seed(0)
        for weight in plan.weights:  # one at a time: all ranks together have no room for whole models
            whole = torch.rand(weight.shape, generator=g).sub_(0.5)
            if weight.name in self.all_boxes[self.rank]:
                self.held[weight.name] = whole[slices(self.all_boxes[self.rank][weight.name])].clone()
            self.cut(self.due, weight, whole)

    def boxes(self, layout: ParallelLayout, rank: int) -> dict[str, Box]:
        """The part of each weight that a rank of a layout has."""
        shares = ((w.name, share) for w in self.plan.weights for share in layout.shares(w))
        return {name: share.box for name, share in shares if rank in share.ranks}

    def cut(self, found: Tensors, weight: Weight, whole: torch.Tensor) -> None:
        """Put this rank's part of a whole tensor where it belongs."""
        for local, box, whole_box in self.places.get(weight.name, ()):
            self.room(found, local)[slices(box)] = whole[slices(whole_box)]

    @cached_property
    def places(self) -> dict[str, list[tuple[str, Box, Box]]]:
        """Weight -> the parts of the generation shards that it is."""
        found: dict[str, list[tuple[str, Box, Box]]] = {}
        for weight, *place in self.wanted:
            found.setdefault(weight.name, []).append((place[0], place[1], place[2]))
        return found

    @cached_property
    def ends(self) -> dict[str, list[int]]:
        """Shapes of the generation shards."""
        found: dict[str, list[int]] = {}
        for _, local, box, _ in self.wanted:
            ends = [high for _, high in box]
            found[local] = [max(a, b) for a, b in zip(found.get(local, ends), ends, strict=True)]
        return found

    @cached_property
    def wanted(self) -> list[tuple[Weight, str, Box, Box]]:
        """(weight, local name, place there, place in the whole weight) of each part of the generation shards."""
        return [
            (w, *self.plan.rollout.local(w, share.box, share.box), share.box)
            for w in self.plan.weights
            for share in self.plan.rollout.shares(w)
            if self.place in share.ranks
        ]

    def room(self, found: Tensors, name: str) -> torch.Tensor:
        """A shard in fresh memory, when its first part comes."""
        if name not in found:
            found[name] = torch.empty(self.ends[name], dtype=torch.bfloat16)
        return found[name]

    def reshard(self) -> Tensors:
        """Only what is missing."""
        self.resharder.to_training()
        return self.resharder.to_rollout(self.held).shards

    def gather(self) -> Tensors:
        """Every tensor whole on every rank, one at a time, then sliced."""
        found: Tensors = {}
        for weight in self.plan.weights:
            whole = self.whole(weight)
            assert whole is not None
            self.cut(found, weight, whole)
        return found

    def whole(self, weight: Weight, only: int | None = None) -> torch.Tensor | None:
        """One tensor gathered on all ranks, or ``only`` one: every rank's part, padded to the largest."""
        parts = [self.all_boxes[rank].get(weight.name) for rank in range(dist.get_world_size())]
        most = max(torch.Size(sizes(box)).numel() for box in parts if box is not None)
        mine = torch.zeros(most, dtype=torch.bfloat16)
        if weight.name in self.held:
            mine[: self.held[weight.name].numel()] = self.held[weight.name].reshape(-1)
        got = list(torch.empty(len(parts), most, dtype=torch.bfloat16).unbind())
        if only is None:
            dist.all_gather(got, mine)
        else:
            dist.gather(mine, got if self.rank == only else None, dst=only)
            if self.rank != only:
                return None
        whole = torch.empty(weight.shape, dtype=torch.bfloat16)
        for box, part in zip(parts, got, strict=True):
            if box is not None:
                shape = sizes(box)
                whole[slices(box)] = part[: torch.Size(shape).numel()].view(shape)
        return whole

    def load_slices(self) -> Tensors:
        """Each rank writes its shards, and finds in all files the slices that it wants."""
        save_file({n: t.bfloat16() for n, t in self.held.items()}, self.folder / f"{self.rank}.safetensors")
        dist.barrier()
        files = [safe_open(self.folder / f"{r}.safetensors", "pt") for r in range(dist.get_world_size())]
        found: Tensors = {}
        for t in self.transfers:
            shard = self.room(found, t.dst_tensor)
            shard[slices(t.dst_box)] = files[t.src].get_slice(t.src_tensor)[slices(t.src_box)]
        return found

    def load_checkpoint(self) -> Tensors:
        """Rank 0 writes one checkpoint of gathered tensors; every rank maps it and slices."""
        path = self.folder / "whole.safetensors"
        gathered: Tensors = {}
        for weight in self.plan.weights:
            whole = self.whole(weight, only=0)
            if whole is not None:
                gathered[weight.name] = whole
        if self.rank == 0:
            save_file(gathered, path)
        dist.barrier()
        found: Tensors = {}
        with safe_open(path, "pt") as file:
            for weight in self.plan.weights:
                if weight.name in self.places:
                    self.cut(found, weight, file.get_tensor(weight.name))
        return found


WAYS: dict[str, Callable[[Rank], Tensors]] = {
    "in place": Rank.reshard, "gather and slice": Rank.gather, "save and load slices": Rank.load_slices,
    "save and load a checkpoint": Rank.load_checkpoint,
}  # fmt: skip


def work(number: int, plan: Plan, folder: str, repeat: int, results: object) -> None:
    """One process."""
    torch.set_num_threads(1)
    world = plan.train.ranks
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=number, world_size=world)
    rank = Rank(plan, Path(folder))
    begin = time.perf_counter()
    for round_number in range(repeat + 1):  # the first round is a warm-up
        late = torch.tensor([time.perf_counter() - begin > LONGEST])
        dist.broadcast(late, 0)
        if round_number > LEAST and bool(late):
            break
        for way, call in WAYS.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            found = call(rank)
            took = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
            assert all(torch.equal(found[name], due) for name, due in rank.due.items()), way
            del found
            every = [torch.zeros_like(took) for _ in range(world)]
            dist.all_gather(every, took)
            if number == 0:
                results.put((way, max(float(t[0]) for t in every), sum(float(t[1]) for t in every)))  # type: ignore[attr-defined]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", help="layouts whose name has this in it")
    arguments = parser.parse_args()
    weights = [
        w for w in model_weights(preset(arguments.model), "BF16") if w.layer is None or w.layer < arguments.layers
    ]
    size = sum(weight.nbytes for weight in weights)
    print(f"{arguments.model}, {arguments.layers} layers, {size / 1e6:.0f} MB in bf16; load {os.getloadavg()[0]:.1f}")
    context = multiprocessing.get_context("spawn")
    for name, (train, rollout) in LAYOUTS.items():
        if arguments.only and arguments.only not in name:
            continue
        plan = Plan(weights, train, rollout, best_placement(weights, train, rollout, Cluster(8), together=rollout.tp))
        folder = tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None)
        results = context.SimpleQueue()
        try:
            multiprocessing.spawn(work, (plan, folder, arguments.repeat, results), train.ranks)
        finally:
            shutil.rmtree(folder)
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        while not results.empty():
            way, *seconds = results.get()
            taken[way].append((seconds[0], seconds[1]))
        rounds_made = len(taken["in place"]) - 1
        print(f"{name}: {plan.bytes_moved / 1e6:.0f} MB move, {rounds_made} rounds, load {os.getloadavg()[0]:.1f}")
        ours = taken["in place"][1:]
        for way, rounds in taken.items():
            wall, cpu = (statistics.median(r[i] for r in rounds[1:]) for i in (0, 1))
            ratios = [[b[i] / a[i] for a, b in zip(ours, rounds[1:], strict=True)] for i in (0, 1)]
            faster = " ".join(f"{statistics.median(r):.2f}" for r in ratios)
            print(f"  {way:28} {wall:7.3f} s  CPU {cpu:7.3f} s   ratio to in place (wall, CPU) {faster}", flush=True)


if __name__ == "__main__":
    main()
