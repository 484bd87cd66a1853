"""How fast weights reach the rollout workers: backends measured in turn on this machine, in real processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from rlctl.ops.sync_bench_choice import Unavailable
from rlctl.ops.sync_bench_contest import Sample
from rlctl.ops.sync_bench_options import BenchOptions, Squad, groups
from rlctl.ops.sync_bench_rows import Limit, Row, limit_of, row_of
from rlctl.ops.sync_bench_turns import Advance, Entry, take_turns
from rlctl.ops.sync_bench_workload import total_bytes


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
    """

    options: BenchOptions
    limit: Limit
    rows: list[Row]
    failed: list[Failed] = field(default_factory=list)
    groups: int = 1

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
            "rows": [asdict(row) for row in self.rows],
            "unavailable": [asdict(reason) for reason in unavailable],
            "failed": [asdict(failure) for failure in self.failed],
            "limit": asdict(self.limit),
        }


def plan_bench(options: BenchOptions) -> list[list[Squad]]:
    """Return the groups that this machine's free memory allows; see ``groups``."""
    return groups(options, psutil.virtual_memory().available)


def run_bench(options: BenchOptions, parts: Sequence[Sequence[Squad]], advance: Advance = lambda: None) -> BenchResult:
    """Measure, one repetition of each in turn, the memory copy among them.

    Args:
        options: what.
        parts: which of it goes side by side (``plan_bench``).
        advance: called after each repetition; there are ``repetitions`` of them.
    """
    skip, nbytes = 1 + options.warmup, total_bytes(options.tensors)
    copies, rows, failed = list[Sample](), list[Row](), list[Failed]()
    for part in parts:
        own, entries = take_turns(options, part, advance)
        copies += own[skip:]
        rows += _rows(entries, limit_of(own[skip:], nbytes), nbytes, skip)
        failed += [Failed(entry.backend, entry.variant, entry.error) for entry in entries if entry.error]
    return BenchResult(options, limit_of(copies, nbytes), rows, failed, len(parts))


def repetitions(options: BenchOptions, parts: Sequence[Sequence[Squad]]) -> int:
    """Return how many repetitions ``run_bench`` does."""
    return options.rounds * sum(1 + sum(squad.contestants for squad in part) for part in parts)


def _rows(entries: Sequence[Entry], limit: Limit, nbytes: int, skip: int) -> list[Row]:
    rows = dict[int, Row]()
    raw: Row | None = None
    # Backwards: a library driven raw stands behind the backend that it is compared with.
    for place, entry in reversed(list(enumerate(entries))):
        if not entry.error:
            rows[place] = row_of(
                entry.backend,
                entry.variant,
                entry.bucket,
                entry.samples,
                entry.samples[skip:],
                nbytes=nbytes,
                limit=limit,
                raw=raw if entry.variant == "full" else None,
            )
        raw = rows.get(place) if entry.variant == "raw" else None
    return [rows[place] for place in sorted(rows)]
