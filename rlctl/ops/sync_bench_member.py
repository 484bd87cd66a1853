"""A member process of a sync bench: a member of a sync that can also be measured, and driven without rlctl's engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from rlctl.ops.sync_bench_workload import make, mutate
from rlctl.process import Channel
from rlctl.sync.buckets import copy_array, flat_bytes
from rlctl.sync.digest import FullHasher, NoHasher
from rlctl.sync.engine import TransferStats
from rlctl.sync.host import Received, serve_host
from rlctl.sync.member import MemberHost, Weights
from rlctl.sync.protocols import LoadReport
from rlctl.sync.tensor_meta import TensorMeta


class Usage(msgspec.Struct):
    """What a process used since ``begin``: CPU seconds of all its threads, and how much its resident memory grew."""

    cpu_s: float
    extra_bytes: int


class RawTransport(Protocol):
    """A library driven with nothing around it, between trainer 0 (rank 0) and the rollout workers."""

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Send every tensor."""

    def receive(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Receive every tensor in its place; returns when all bytes are there."""


class BenchHost(MemberHost):
    """A member; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self._cpu = 0.0
        self._resident = 0
        self._raw: RawTransport | None = None
        self._copy: Weights = {}
        self._viewed: dict[str, TensorMeta] | None = None

    def read_views(self) -> None:
        """Have no weights of its own from now on: read a trainer's where they lie."""
        self._viewed = {name: TensorMeta.of(name, tensor) for name, tensor in self.weights.items()}
        self.engine.bind({})
        self.weights = {}

    def let_go(self) -> None:
        """Read nothing: the trainer is to change it."""
        self.weights = {}
        self.engine.release_weights()

    def receive(self, version: int, base_version: int | None = None, cast: bool = False) -> Received:
        """See MemberHost."""
        if self._viewed is None:
            return super().receive(version, base_version, cast)
        self.version = None
        self.weights = dict(self.engine.map_weights(version))
        alike = {n for n, tensor in self.weights.items() if self._viewed.get(n) == TensorMeta.of(n, tensor)}
        report = LoadReport(
            sorted(alike), sorted(self.weights.keys() - alike), sorted(self._viewed.keys() - self.weights.keys())
        )
        assert self.engine.summary is not None
        return Received(report, self.engine.stats, self.engine.summary.digest, version)

    def mutate(self, step: int, change: float) -> None:
        """Change the weights as a step of training would."""
        mutate(self.weights, step=step, change=change)

    def settle_memory(self) -> None:
        """Count the memory that comes from now on."""
        self._resident = _status_bytes("VmRSS")

    def begin(self) -> None:
        """Count CPU seconds, and the peak of memory, from now on."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak of the resident memory
        self._cpu = time.process_time()

    def usage(self) -> Usage:
        """Return what was used since ``begin``; memory against ``settle_memory``."""
        return Usage(time.process_time() - self._cpu, max(_status_bytes("VmHWM") - self._resident, 0))

    def stats(self) -> TransferStats:
        """Return the statistics of the last transfer."""
        return self.engine.stats

    # The same library without rlctl

    def raw_open(self, factory: str, rank: int, world: int, meeting: str) -> None:
        """Connect ``module:Class(rank, world, meeting)``."""
        module, _, attribute = factory.partition(":")
        self._raw = getattr(import_module(module), attribute)(rank, world, meeting)

    def raw_send(self) -> None:
        """Send the weights."""
        assert self._raw is not None
        self._raw.send(self.weights)

    def raw_receive(self) -> None:
        """Receive the weights; what they were known to be, they are no more."""
        assert self._raw is not None
        self._raw.receive(self.weights)

    # The limit

    def make_copy(self) -> None:
        """Allocate tensors to copy the weights to."""
        self._copy = make([TensorMeta.of(name, tensor) for name, tensor in self.weights.items()], None)

    def copy(self, times: int) -> float:
        """Copy each tensor ``times`` times, one thread; return wall seconds."""
        pairs = [(self._copy[n], t) for n, t in self.weights.items()]
        start = time.perf_counter()
        for _ in range(times):
            for target, source in pairs:
                target.copy_(source)
        return time.perf_counter() - start

    def hash_cost(self) -> float:
        """Return the CPU seconds that digests of all bytes add to a copy of the weights, each piece hashed while it is
        in the cache: what one side pays for verify=full."""
        pairs = [(flat_bytes(self._copy[n]), flat_bytes(t)) for n, t in self.weights.items()]

        def copied(hashing: type[FullHasher | NoHasher]) -> float:
            start = time.process_time()
            for target, source in pairs:
                assert target is not None
                assert source is not None
                copy_array(target, source, hashing())
            return time.process_time() - start

        plain = copied(NoHasher)
        return max(copied(FullHasher) - plain, 0.0)


def serve(channel: Channel) -> None:
    """Entry point of a member process."""
    serve_host(channel, BenchHost())


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(field)
