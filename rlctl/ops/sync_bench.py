"""How fast weights reach the rollout workers: backends measured in turn on this machine, in real processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from rlctl.errors import RlctlError, UsageError
from rlctl.ops.sync_bench_choice import Unavailable
from rlctl.ops.sync_bench_contest import Contestant, CopyContestant, RawContestant, Sample, SyncContestant
from rlctl.ops.sync_bench_raw import RAW
from rlctl.ops.sync_bench_rows import Limit, Row, limit_of, row_of
from rlctl.ops.sync_bench_workload import total_bytes
from rlctl.process import run_token
from rlctl.sync.digest import Verify
from rlctl.sync.engine import EngineOptions
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.units import format_bytes

Advance = Callable[[], None]


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
class Failed:
    """A backend that broke while it was measured."""

    backend: str
    variant: str
    error: str


@dataclass
class BenchResult:
    """What was measured."""

    options: BenchOptions
    limit: Limit
    rows: list[Row]
    failed: list[Failed] = field(default_factory=list)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the model."""
        return total_bytes(self.options.tensors)

    def document(self, unavailable: Sequence[Unavailable]) -> dict[str, Any]:
        """Return the result as plain data."""
        o = self.options
        return {
            "weights_bytes": self.weights_bytes,
            "tensors": len(o.tensors),
            "trainers": o.trainers,
            "rollouts": o.rollouts,
            "iters": o.iters,
            "warmup": o.warmup,
            "change": o.change,
            "verify": o.verify,
            "rows": [asdict(row) for row in self.rows],
            "unavailable": [asdict(reason) for reason in unavailable],
            "failed": [asdict(failure) for failure in self.failed],
            "limit": asdict(self.limit),
        }


@dataclass
class _Entry:
    backend: str
    variant: str
    bucket: int | None
    contestant: Contestant
    samples: list[Sample] = field(default_factory=list)


def run_bench(options: BenchOptions, advance: Advance = lambda: None) -> BenchResult:
    """Measure, one repetition of each in turn (A B C A B C ...), the memory copy among them.

    Args:
        options: what.
        advance: called after each repetition; there are ``repetitions(options)`` of them.

    Raises:
        UsageError: the memory of this machine does not suffice.
    """
    limit = CopyContestant(options.tensors, options.rollouts, options.change)
    entries = _entries(options)
    _require_memory(options, entries)
    copies, failed = list[Sample](), list[Failed]()
    with ExitStack() as stack:
        stack.callback(limit.close)
        limit.open()
        for entry in entries:
            stack.callback(entry.contestant.close)
        going = [entry for entry in entries if _survives(entry, failed, None)]
        for step in range(1, options.rounds + 1):
            copies.append(limit.rep(step))
            advance()
            going = [entry for entry in going if _survives(entry, failed, step)]
            for _ in entries:
                advance()
    return _result(options, copies, going, failed)


def repetitions(options: BenchOptions) -> int:
    """Return how many repetitions ``run_bench`` does."""
    return options.rounds * (1 + len(_plan(options)))


def _plan(options: BenchOptions) -> list[tuple[str, str, int | None]]:
    """Return (backend, variant, bucket) of every contestant; raw ones behind the one whose processes they use."""
    plan: list[tuple[str, str, int | None]] = []
    for backend in options.backends:
        for bucket in options.buckets:
            plan.append((backend, "full", bucket))
            if options.raw and backend in RAW and bucket == options.buckets[0]:
                plan.append((backend, "raw", None))
            if options.delta:
                plan.append((backend, "delta", bucket))
    return plan


def _entries(options: BenchOptions) -> list[_Entry]:
    entries = list[_Entry]()
    base: SyncContestant | None = None
    for backend, variant, bucket in _plan(options):
        contestant: Contestant
        if bucket is None:
            assert base is not None
            contestant = RawContestant(base, RAW[backend])
        else:
            base = _sync_contestant(options, backend, bucket, delta=variant == "delta")
            contestant = base
        entries.append(_Entry(backend, variant, bucket, contestant))
    return entries


def _sync_contestant(options: BenchOptions, backend: str, bucket: int, *, delta: bool) -> SyncContestant:
    engine = EngineOptions(
        bucket_size=bucket,
        timeout=options.timeout,
        verify=options.verify,
        senders=options.trainers,
        token=run_token(),
    )
    return SyncContestant(
        backend, options.tensors, options.trainers, options.rollouts, engine, change=options.change, delta=delta
    )


def _survives(entry: _Entry, failed: list[Failed], step: int | None) -> bool:
    """Open an entry, or do its repetition ``step``; an error is noted, so that it does not cost the others' figures."""
    try:
        if step is None:
            entry.contestant.open()
        else:
            entry.samples.append(entry.contestant.rep(step))
    except RlctlError as error:
        failed.append(Failed(entry.backend, entry.variant, error.message))
        return False
    return True


def _require_memory(options: BenchOptions, entries: Sequence[_Entry]) -> None:
    weights = total_bytes(options.tensors)
    squads = [e for e in entries if e.bucket is not None]
    members = options.trainers + options.rollouts
    copies = 2 + sum(members + (options.trainers if e.variant == "delta" else 0) for e in squads)
    buffers = sum(2 * (e.bucket or 0) * members for e in squads)
    processes = (1 + len(squads) * members) * (300 << 20)
    needed, free = copies * weights + buffers + processes, psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"{format_bytes(needed)} of memory are needed ({copies} copies of {format_bytes(weights)} and buffers), "
            f"and {format_bytes(free)} are free",
            fix="measure fewer backends at a time, or less: --size 256MiB",
        )


def _result(
    options: BenchOptions, copies: Sequence[Sample], entries: Sequence[_Entry], failed: list[Failed]
) -> BenchResult:
    nbytes = total_bytes(options.tensors)
    skip = 1 + options.warmup
    limit = limit_of(copies[skip:], nbytes)
    rows = dict[tuple[str, str, int | None], Row]()
    for entry in sorted(entries, key=lambda e: e.variant != "raw"):
        rows[entry.backend, entry.variant, entry.bucket] = row_of(
            entry.backend, entry.variant, entry.bucket, entry.samples[0], entry.samples, entry.samples[skip:],
            nbytes=nbytes, limit=limit, raw=rows.get((entry.backend, "raw", None)) if entry.variant == "full" else None,
        )  # fmt: skip
    return BenchResult(options, limit, [rows[e.backend, e.variant, e.bucket] for e in entries], failed)
