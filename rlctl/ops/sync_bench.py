"""How fast weights reach the rollout workers: backends measured in turn on this machine, in real processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from rlctl.errors import CheckError, RlctlError
from rlctl.ops.sync_bench_choice import Unavailable
from rlctl.ops.sync_bench_contest import Sample
from rlctl.ops.sync_bench_options import BenchOptions, Host, Squad, groups
from rlctl.ops.sync_bench_raw import RAW
from rlctl.ops.sync_bench_remote import OtherHost
from rlctl.ops.sync_bench_rows import Comparison, Limit, Row, limit_of, row_of
from rlctl.ops.sync_bench_turns import Advance, Entry, take_turns
from rlctl.ops.sync_bench_workload import total_bytes

_ROOM = "make room in /dev/shm (docker run --shm-size), give --option file.folder=DIR, or take a smaller --size"


@dataclass(frozen=True)
class Failed:
    """A backend that broke while it was measured."""

    backend: str
    variant: str
    error: str


@dataclass
class BenchResult:
    """What was measured.

    Attributes:
        limit: over all repetitions of the memory copy.
        groups: how many groups took turns, each beside a memory copy of its own; ratios are taken in the group.
        other_host: where the rollout workers were, if not on this host.
    """

    options: BenchOptions
    limit: Limit
    rows: list[Row]
    failed: list[Failed] = field(default_factory=list)
    groups: int = 1
    other_host: str | None = None

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
            "groups": self.groups,
            "other_host": self.other_host,
            "rows": [asdict(row) for row in self.rows],
            "unavailable": [asdict(reason) for reason in unavailable],
            "failed": [asdict(failure) for failure in self.failed],
            "limit": asdict(self.limit),
        }


def plan_bench(options: BenchOptions, other: OtherHost | None = None) -> list[list[Squad]]:
    """Return the groups that the free memory allows; see ``groups``. ``other``: where the rollout workers are."""
    free = psutil.virtual_memory().available
    if other is None:
        return groups(options, [Host(free, options.trainers, options.rollouts)])
    there = Host(other.free, 0, options.rollouts, copies=False, name=other.host)
    return groups(options, [Host(free, options.trainers, 0), there])


def notes(options: BenchOptions, parts: Sequence[Sequence[Squad]]) -> list[str]:
    """Return what a reader of the figures should know beforehand."""
    found = []
    without = [name for name in options.backends if name not in RAW]
    if options.raw and without:
        found.append(f"no raw figure for {', '.join(without)}")
    if len(parts) > 1:
        found.append(f"the memory does not hold all at once: {len(parts)} groups, each beside its own memory copy")
    return found


def run_bench(
    options: BenchOptions,
    parts: Sequence[Sequence[Squad]],
    advance: Advance = lambda: None,
    other: OtherHost | None = None,
) -> BenchResult:
    """Measure, one repetition of each in turn, the memory copy among them.

    Args:
        options: what.
        parts: which of it goes side by side (``plan_bench``).
        advance: called after each repetition; there are ``repetitions`` of them.
        other: where the rollout workers are, if not on this host.
    """
    skip, nbytes = 1 + options.warmup, total_bytes(options.tensors)
    copies, rows, failed = list[Sample](), list[Row](), list[Failed]()
    for part in parts:
        own, entries = take_turns(options, part, advance, other)
        warm = own[skip:] or own  # fewer where everything broke early
        copies += warm
        rows += _rows(entries, limit_of(warm, nbytes), nbytes, skip)
        failed += [Failed(entry.backend, entry.variant, entry.error) for entry in entries if entry.error]
    host = None if other is None else other.host
    return BenchResult(options, limit_of(copies, nbytes), rows, failed, len(parts), host)


def repetitions(options: BenchOptions, parts: Sequence[Sequence[Squad]]) -> int:
    """Return how many repetitions ``run_bench`` does."""
    return options.rounds * sum(1 + sum(squad.contestants for squad in part) for part in parts)


def _rows(entries: Sequence[Entry], limit: Limit, nbytes: int, skip: int) -> list[Row]:
    def row(entry: Entry, raw: Row | None) -> Row:
        reps = entry.samples
        return row_of(
            entry.backend, entry.variant, entry.bucket, reps, reps[skip:], nbytes=nbytes, limit=limit, raw=raw
        )

    whole = [entry for entry in entries if not entry.error]
    raws = {entry.backend: row(entry, None) for entry in whole if entry.variant == "raw"}
    return [
        raws[entry.backend]
        if entry.variant == "raw"
        else row(entry, None if entry.variant == "delta" else raws.get(entry.backend))
        for entry in whole
    ]


def check(result: BenchResult, fail_below: float | None, comparison: Sequence[Comparison]) -> None:
    """Raise CheckError for wrong bits and for what is too slow, RlctlError when a backend broke."""
    if result.failed:
        broken = "; ".join(f"{f.backend} ({f.variant}): {f.error}" for f in result.failed)
        full = any(reason in broken for reason in ("No space left", "Read-only file system"))
        raise RlctlError(
            f"broke while it was measured: {broken}",
            fix=_ROOM if full else None,
        )
    wrong = [f"{row.backend} ({row.variant}): {row.wrong}" for row in result.rows if row.wrong]
    if wrong:
        raise CheckError(f"tensors arrived with wrong bits: {', '.join(wrong)}")
    if fail_below is None:
        return
    against = "the old result" if comparison else "the memory copy"
    ratios = [(c.backend, c.variant, c.speed) for c in comparison] or [
        (row.backend, row.variant, row.limit_ratio.wall) for row in result.rows
    ]
    slow = [f"{name} ({variant}) {ratio:.3f}" for name, variant, ratio in ratios if ratio < fail_below]
    if slow:
        raise CheckError(f"slower than {fail_below:g} of {against}: {', '.join(slow)}")
