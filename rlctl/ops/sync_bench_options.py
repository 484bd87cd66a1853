"""What a sync bench is to measure, and which of it goes side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.errors import UsageError
from rlctl.ops.sync_bench_raw import RAW
from rlctl.ops.sync_bench_workload import total_bytes
from rlctl.sync.digest import Verify
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.sync.traits import BACKEND_TRAITS
from rlctl.units import format_bytes

# What a member's process needs beside weights and buckets: its interpreter, torch, a transport's threads.
_PROCESS_BYTES = 160 << 20


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        backends: names of checkpoint engines that run here.
        tensors: of the model; every trainer rank has them whole.
        buckets: bytes; each backend is measured with each.
        iters: repetitions that count, after one cold one and ``warmup`` more.
        delta: measure deltas too.
        change: share of the elements that change from one repetition to the next.
        raw: measure the backends' libraries without rlctl too, where there is a way.
    """

    backends: Sequence[str]
    tensors: Sequence[TensorMeta]
    trainers: int = 1
    rollouts: int = 1
    buckets: Sequence[int] = (64 << 20,)
    iters: int = 5
    warmup: int = 1
    delta: bool = False
    change: float = 1.0
    verify: Verify = "full"
    raw: bool = False
    timeout: float = 120.0

    @property
    def rounds(self) -> int:
        """Repetitions of each contestant."""
        return 1 + self.warmup + self.iters


@dataclass(frozen=True)
class Squad:
    """One backend's processes; ``raw``: its library is driven raw in them too; ``way``: the value of that option."""

    backend: str
    bucket: int
    delta: bool = False
    raw: bool = False
    way: str = ""

    @property
    def contestants(self) -> int:
        """How many figures it gives."""
        return 2 if self.raw else 1


def squads(options: BenchOptions) -> list[Squad]:
    """Return everything that is to be measured, beside the memory copy."""
    found = []
    for backend in options.backends:
        for index, bucket in enumerate(options.buckets):
            found.append(Squad(backend, bucket, raw=options.raw and backend in RAW and index == 0))
            ways = BACKEND_TRAITS[backend].ways if backend in BACKEND_TRAITS else ()
            found += [Squad(backend, bucket, way=way) for way in ways[1:]]
            if options.delta:
                found.append(Squad(backend, bucket, delta=True))
    return found


def groups(options: BenchOptions, free: int) -> list[list[Squad]]:
    """Return what is measured in turn: all of it, or as much at a time as ``free`` bytes of memory hold.

    Raises UsageError when they do not hold one squad.
    """
    weights = total_bytes(options.tensors)
    copying = 2 * weights + _PROCESS_BYTES
    found: list[list[Squad]] = []
    room = 0
    for squad in squads(options):
        needed = _bytes_of(squad, options, weights)
        if copying + needed > free:
            raise UsageError(
                f"{squad.backend} needs {format_bytes(copying + needed)} of memory for {format_bytes(weights)} of "
                f"weights in each process, and {format_bytes(free)} are free",
                fix="measure less, such as --size 256MiB, or with fewer members",
            )
        if needed > room:
            found.append([])
            room = free - copying
        found[-1].append(squad)
        room -= needed
    return found


def _bytes_of(squad: Squad, options: BenchOptions, weights: int) -> int:
    members = options.trainers + options.rollouts
    # One more copy: what some backends keep beside the weights (a generation, a file, staged shards).
    copies = members + 1 + (options.trainers if squad.delta else 0)
    return copies * weights + members * (2 * squad.bucket + _PROCESS_BYTES)
