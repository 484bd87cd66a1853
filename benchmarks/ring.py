"""Shared-memory ring against an in-process copy of the same tensors, interleaved.

    python benchmarks/ring.py --repeat 9

Sender and receiver are real processes with weights of their own. CPU seconds are both sides together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time

import torch

from rlctl.keys.presets import preset
from rlctl.keys.shapes import tensor_shapes
from rlctl.sync.buckets import allocate
from rlctl.sync.channel import Channel
from rlctl.sync.cutting import flat_layout
from rlctl.sync.deadline import Deadline
from rlctl.sync.packer import Packer
from rlctl.sync.ring import RingConsumer, RingProducer
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.sync.unpacker import Unpacker

GIB = 1 << 30
Weights = dict[str, torch.Tensor]


def weights(model: str) -> Weights:
    """bf16 tensors of a preset in touched memory."""
    metas = [TensorMeta(n, "BF16", s) for n, s in tensor_shapes(preset(model)).items()]
    chunks, total = flat_layout(metas)
    block = allocate(total)
    return {
        c.tensor.name: block[c.offset : c.offset + c.nbytes].view(torch.bfloat16).view(c.tensor.shape) for c in chunks
    }


def receiver(channel: Channel, model: str, plan: list[str]) -> None:
    """Take one sync for each entry of ``plan`` and report CPU seconds."""
    torch.set_num_threads(1)
    targets = weights(model)
    unpacker = Unpacker()
    consumer = RingConsumer(channel, Deadline(60))
    channel.send(b"ready", Deadline(60))
    for version, verify in enumerate(plan):
        unpacker.begin(version=version, verify=verify)  # type: ignore[arg-type]
        cpu = time.process_time()
        unpacker.into(consumer.buckets(Deadline(60)), targets)
        channel.send(f"{time.process_time() - cpu}".encode(), Deadline(60))
    os._exit(0)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--slot", type=int, default=6 << 20)
    parser.add_argument("--slots", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = ["off", "full"] * (args.repeat + 1)
    mine, other = Channel.pair("trainer", "rollout")
    child = multiprocessing.get_context("fork").Process(target=receiver, args=(other, args.model, plan), daemon=True)
    child.start()
    other.close()
    source, copy = weights(args.model), weights(args.model)
    for tensor in source.values():
        tensor.view(torch.int16).random_(-(1 << 15), 1 << 15)
    nbytes = sum(t.nbytes for t in source.values())
    ring = RingProducer(args.slot, args.slots)
    ring.attach(mine, Deadline(60))
    assert mine.receive(Deadline(60)) == b"ready"
    rows: dict[str, list[tuple[float, float]]] = {
        "in-process copy": [],
        "ring, verify off": [],
        "ring, verify full": [],
    }
    for version, verify in enumerate(plan):
        wall, cpu = time.monotonic(), time.process_time()
        for name, tensor in source.items():
            copy[name].copy_(tensor)
        rows["in-process copy"].append((time.monotonic() - wall, time.process_time() - cpu))
        ring.begin(Deadline(60))
        wall, cpu = time.monotonic(), time.process_time()
        for bucket in Packer(args.slot, ring.acquire, version=version, verify=verify).pack(source.items()):  # type: ignore[arg-type]
            ring.publish(bucket)
        ring.finish()
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        rows[f"ring, verify {verify}"].append((wall, cpu + float(mine.receive(Deadline(60)))))
    child.join(10)
    print(f"{args.model}: {nbytes / GIB:.3f} GiB, {len(source)} tensors, {args.slots} slots of {args.slot >> 20} MiB")
    limit_wall = statistics.median(w for w, _ in rows["in-process copy"][1:])
    limit_cpu = statistics.median(c for _, c in rows["in-process copy"][1:])
    for name, samples in rows.items():
        walls, cpus = [w for w, _ in samples[1:]], [c for _, c in samples[1:]]
        wall, cpu = statistics.median(walls), statistics.median(cpus)
        print(
            f"{name:18} wall {wall:.3f} s (best {min(walls):.3f}) {100 * limit_wall / wall:4.0f} % of the copy   "
            f"cpu {cpu:.3f} s (best {min(cpus):.3f}) {100 * limit_cpu / cpu:4.0f} %"
        )
    extra = statistics.median(c for _, c in rows["ring, verify full"][1:]) - statistics.median(
        c for _, c in rows["ring, verify off"][1:]
    )
    print(f"verification: {extra / 2 / (nbytes / GIB):.4f} CPU s per GiB and side")


if __name__ == "__main__":
    main()
