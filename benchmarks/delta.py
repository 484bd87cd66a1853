"""Size and speed of deltas between two versions of bf16 weights.

    PYTHONPATH=. python benchmarks/delta.py --mib 512
    PYTHONPATH=. python benchmarks/delta.py --mib 512 --engine gloo

Random: the given share of the elements gets random values. AdamW: bf16 copies of fp32 masters off the bf16 grid,
after the second and the third step of torch's optimizer. GiB of one copy scanned per CPU second, one core. With
``--engine``: whole syncs between two processes, from one version to the other and back, digests included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from rlctl.process import run_token
from rlctl.sync.deadline import Deadline
from rlctl.sync.delta_codec import apply, encode, find_changes
from rlctl.sync.digest import content_digest
from rlctl.sync.engine import EngineOptions
from rlctl.sync.manager import SyncManager
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.policy import SyncPolicy
from tests.sync.squad import Served

GIB = 1 << 30
Bits = npt.NDArray[np.uint16]


def random_change(elements: int, density: float, seed: int = 0) -> tuple[Bits, Bits]:
    """Two versions; each element changes with probability ``density`` to other random bits."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, elements, dtype=np.uint16)
    new = old.copy()
    where = np.flatnonzero(rng.random(elements, dtype=np.float32) < density)
    new[where] ^= rng.integers(1, 1 << 16, where.size, dtype=np.uint16)
    return old, new


def adamw_steps(elements: int, lr: float, seed: int = 0) -> tuple[Bits, Bits]:
    """bf16 bits after steps 2 and 3 of AdamW on normal masters of standard deviation 0.02."""
    torch.manual_seed(seed)
    master = torch.nn.Parameter(torch.randn(elements) * 0.02)
    optimizer = torch.optim.AdamW([master], lr=lr)
    copies = []
    for _ in range(3):
        copies.append(master.detach().bfloat16())
        master.grad = torch.randn(elements) * 1e-3
        optimizer.step()
    return _bits(copies[-1]), _bits(master.detach().bfloat16())


CHANGES = {"random": random_change, "adamw": adamw_steps}


def _bits(tensor: torch.Tensor) -> Bits:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def best(act: Callable[[], object], repeat: int) -> float:
    """Least CPU seconds of ``repeat`` runs."""
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        act()
        times.append(time.process_time() - begin)
    return min(times)


def row(name: str, old: Bits, new: Bits, repeat: int) -> str:
    """Code, decode, compare; return a line of the table."""
    before, after = old.view(np.uint8), new.view(np.uint8)
    base = content_digest(before)
    change = find_changes(before, after, "BF16")

    def code() -> object:
        return encode(find_changes(before, after, "BF16"), "BF16", (old.size,), base)

    payload = encode(change, "BF16", (old.size,), base)
    copy = before.copy()
    apply(payload, copy)
    assert (copy == after).all()
    encode_s, decode_s = best(code, repeat), best(lambda: apply(payload, copy), repeat)

    def checked() -> None:
        content_digest(copy)
        apply(payload, copy)
        content_digest(copy)

    checked_s = best(checked, repeat)
    size = before.nbytes / GIB
    return (
        f"| {name} | {100 * change.density:.2f} % | {payload.nbytes / max(change.positions.size, 1):.2f} | "
        f"{100 * payload.nbytes / before.nbytes:.2f} % | {size / encode_s:.2f} | {size / decode_s:.2f} | "
        f"{size / checked_s:.2f} |"
    )


def sample(mib: int, kind: str, amount: float, version: int) -> dict[str, torch.Tensor]:
    """What a member loads: one of two versions (-1: zeros) in tensors of 8 MiB."""
    elements = mib << 19
    bits = np.zeros(elements, np.uint16) if version < 0 else CHANGES[kind](elements, amount)[version]
    parts = np.array_split(bits.view(np.int16), max(mib // 8, 1))
    return {f"layers.{i}.weight": torch.from_numpy(p.copy()).view(torch.bfloat16) for i, p in enumerate(parts)}


def engine_row(name: str, engine: str, kind: str, amount: float, mib: int, repeat: int) -> str:
    """Sync to and fro; return a line of the table, the least CPU seconds of each side."""
    old, new = CHANGES[kind](mib << 19, amount)
    changed = np.count_nonzero(old != new)
    options = EngineOptions(bucket_size=64 << 20, token=run_token(), delta=True)
    target = "rlctl.ops.sync_bench_member:serve"
    trainers = MemberProcesses("trainer", 1, engine, options, target=target)
    rollouts = MemberProcesses("rollout", 1, engine, options, target=target)
    replicas = [Served(member) for member in rollouts.members]
    manager = SyncManager(trainers, rollouts, replicas, engine=engine, policy=SyncPolicy(delta=True, attempts=1))
    factory, given, wait = "benchmarks.delta:sample", {"mib": mib, "kind": kind, "amount": amount}, Deadline(300)
    encode, decode, sent = list[float](), list[float](), 0
    try:
        for side in (trainers, rollouts):
            side.open(60)
        rollouts.ask("load", wait, factory=factory, arguments={**given, "version": -1})
        for version in range(2 * repeat + 1):
            trainers.ask("load", wait, factory=factory, arguments={**given, "version": version % 2})
            report = manager.sync(version)
            assert trainers.ask("digest", wait) == rollouts.ask("digest", wait)
            if version:
                sent = report.bytes
                encode.append(trainers.ask("stats", wait)[0]["cpu_s"])
                decode.append(rollouts.ask("stats", wait)[0]["cpu_s"])
    finally:
        trainers.close()
        rollouts.close()
    size = mib / 1024
    return (
        f"| {name}, {engine} | {100 * changed / old.size:.2f} % | {sent / changed:.2f} | "
        f"{100 * sent / old.nbytes:.2f} % | {size / min(encode):.2f} | | {size / min(decode):.2f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--engine", help="checkpoint engine to sync through")
    args = parser.parse_args()
    torch.set_num_threads(1)
    elements = args.mib << 19
    print("| change | changed | bytes a change | of dense | encode GiB/s | decode GiB/s | decode, both digests |")
    print("|---|---|---|---|---|---|---|")
    if args.engine:
        print(engine_row("random 2 %", args.engine, "random", 0.02, args.mib, args.repeat))
        print(engine_row("AdamW lr 1e-06, third step", args.engine, "adamw", 1e-6, args.mib, args.repeat))
        return
    for density in (0.0002, 0.02, 0.12):
        print(row(f"random {100 * density:g} %", *random_change(elements, density), args.repeat))
    for lr in (1e-6, 1e-5):
        print(row(f"AdamW lr {lr:g}, third step", *adamw_steps(elements, lr), args.repeat))


if __name__ == "__main__":
    main()
