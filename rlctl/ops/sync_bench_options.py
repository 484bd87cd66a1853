"""What a sync bench is to measure, and which of it goes side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        extras: backend -> its own options.
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
    extras: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """Repetitions of each contestant."""
        return 1 + self.warmup + self.iters


@dataclass(frozen=True)
class Squad:
    """One backend's processes; ``raw``: its library is driven raw in them too; ``way``: the value of that option, where
    the backend has it; ``views``: receivers read the weights where they lie."""

    backend: str
    bucket: int
    delta: bool = False
    raw: bool = False
    way: str = ""
    views: bool = False

    @property
    def variant(self) -> str:
        """What its row is called."""
        return "delta" if self.delta else "views" if self.views else self.way or "full"

    @property
    def contestants(self) -> int:
        """How many figures it gives."""
        return 2 if self.raw else 1


def squads(options: BenchOptions) -> list[Squad]:
    """Return everything that is to be measured, beside the memory copy."""
    found = []
    for backend in options.backends:
        for index, bucket in enumerate(options.buckets):
            traits = BACKEND_TRAITS.get(backend)
            asked = options.extras.get(backend, {}).get("way")
            first, *others = (asked,) if asked else (traits.ways if traits is not None else ()) or ("",)
            raw = options.raw and backend in RAW and index == 0
            found.append(Squad(backend, bucket, raw=raw, way=first))
            found += [Squad(backend, bucket, way=way) for way in others]
            if traits is not None and traits.views and first == traits.ways[0]:
                found.append(Squad(backend, bucket, way=first, views=True))
            if options.delta and not (traits is not None and traits.in_place):
                found.append(Squad(backend, bucket, delta=True))
    return found


@dataclass(frozen=True)
class Host:
    """A host's part in the bench: ``free`` bytes of memory for so many members; ``copies``: the memory copy runs there.

    ``name`` is empty for this host.
    """

    free: int
    trainers: int
    rollouts: int
    copies: bool = True
    name: str = ""

    def bytes_of(self, squad: Squad, weights: int) -> int:
        """Return what a squad takes there."""
        members = self.trainers + self.rollouts
        traits = BACKEND_TRAITS.get(squad.backend)
        kept = 1 if traits is None else traits.keeps  # a generation, files, staged shards
        copies = members + kept + (self.trainers if squad.delta else 0)
        return copies * weights + members * (2 * squad.bucket + _PROCESS_BYTES)


def groups(options: BenchOptions, hosts: Sequence[Host]) -> list[list[Squad]]:
    """Return what is measured in turn: all of it, or as much at a time as the free memory of every host holds.

    Raises UsageError when that does not hold one squad.
    """
    weights = total_bytes(options.tensors)
    copying = [2 * weights + _PROCESS_BYTES if host.copies else 0 for host in hosts]
    found: list[list[Squad]] = []
    rooms = [0] * len(hosts)
    for squad in squads(options):
        needed = [host.bytes_of(squad, weights) for host in hosts]
        for host, own, copy in zip(hosts, needed, copying, strict=True):
            if copy + own > host.free:
                there = f" on {host.name}" if host.name else ""
                raise UsageError(
                    f"{squad.backend} needs {format_bytes(copy + own)} of memory for {format_bytes(weights)} of "
                    f"weights in each process, and {format_bytes(host.free)} are free{there}",
                    fix="measure less, such as --size 256MiB, or with fewer members",
                )
        if any(own > room for own, room in zip(needed, rooms, strict=True)):
            found.append([])
            rooms = [host.free - copy for host, copy in zip(hosts, copying, strict=True)]
        found[-1].append(squad)
        rooms = [room - own for room, own in zip(rooms, needed, strict=True)]
    return found
