"""Cost of digests: candidates, from memory and from the cache, and what a verified copy costs beside a plain one.

    python benchmarks/digest.py

CPU seconds per GiB, least of several interleaved runs on one core.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable

import numpy as np
import torch
from xxhash import xxh3_64_digest, xxh3_128_digest

from rlctl.sync.buckets import allocate, copy_bytes
from rlctl.sync.digest import Verify, hasher
from rlctl.sync.tensor_meta import TensorMeta

GIB = 1 << 30
BLOCK = 256 << 20
CACHED = 256 << 10


def interleaved(acts: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Least CPU seconds of each act, run in turn."""
    times: dict[str, float] = {}
    for _ in range(repeat):
        for name, act in acts.items():
            begin = time.process_time()
            act()
            times[name] = min(times.get(name, 1e9), time.process_time() - begin)
    return times


def candidates() -> None:
    """Hash functions that Python packages offer."""
    block = allocate(BLOCK)
    block.random_(0, 256)
    data = block.numpy()
    small = data[:CACHED].copy()
    functions: dict[str, Callable[[memoryview], object]] = {
        "xxh3_128": xxh3_128_digest,
        "xxh3_64": xxh3_64_digest,
        "crc32 (zlib)": zlib.crc32,
        "blake2b": lambda m: hashlib.blake2b(m).digest(),
        "sha256": lambda m: hashlib.sha256(m).digest(),
    }
    try:
        from blake3 import blake3
    except ImportError:
        print("blake3 is not installed: left out")
    else:
        functions["blake3"] = lambda m: blake3(m).digest()

    def over(function: Callable[[memoryview], object]) -> Callable[[], object]:
        return lambda: [function(data[i : i + (1 << 20)].data) for i in range(0, BLOCK, 1 << 20)]

    def cached(function: Callable[[memoryview], object]) -> Callable[[], object]:
        return lambda: [function(small.data) for _ in range(BLOCK // CACHED)]

    cold = interleaved({n: over(f) for n, f in functions.items()}, 3)
    warm = interleaved({n: cached(f) for n, f in functions.items()}, 3)
    print("| digest | from memory, CPU s per GiB | from the cache |\n|---|---|---|")
    for name in functions:
        print(f"| {name} | {cold[name] * GIB / BLOCK:.3f} | {warm[name] * GIB / BLOCK:.3f} |")


def verified_copies() -> None:
    """What verification adds to the copy into a bucket."""
    source, slots = allocate(BLOCK), [allocate(4 << 20) for _ in range(2)]
    source.random_(0, 256)
    meta = TensorMeta("w", "U8", (BLOCK,))
    size = slots[0].numel()

    def copy(verify: Verify) -> None:
        hashing = hasher(meta, verify, 1)
        for i, begin in enumerate(range(0, BLOCK, size)):
            copy_bytes(slots[i % 2], source[begin : begin + size], hashing)

    verifies: tuple[Verify, ...] = ("off", "sampled", "full")
    times = interleaved({v: (lambda v=v: copy(v)) for v in verifies}, 9)  # type: ignore[misc]
    print("\n| verify | copy into buckets, CPU s per GiB | of which verification |\n|---|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {seconds * GIB / BLOCK:.4f} | {(seconds - times['off']) * GIB / BLOCK:.4f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    candidates()
    verified_copies()
