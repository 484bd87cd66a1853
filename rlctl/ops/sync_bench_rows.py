"""The figures of a sync bench: from repetitions to rows."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from rlctl.errors import UsageError
from rlctl.ops.sync_bench_contest import Sample

GIB = 1 << 30


@dataclass(frozen=True)
class Quantiles:
    """Seconds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Sides:
    """CPU seconds of all trainers, and of all rollout workers."""

    trainers: float
    rollouts: float


@dataclass(frozen=True)
class Ratio:
    """How one thing does against another: 1 is as good, 0.5 takes twice the time."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Row:
    """One backend in one variant.

    Attributes:
        variant: ``full``, ``delta`` (what changed), ``raw`` (the same library without rlctl), or another way of the
            backend's than its fastest.
        bucket_size: bytes; None for raw.
        bytes_moved: bytes of tensors that left the trainers, median of the warm repetitions.
        cold_s: the first sync: buffers made, connections made, nothing known.
        time_s: of the warm repetitions; with few of them p99 is the slowest.
        cpu_s: of all processes together, median; ``cpu_by_side``: of each side.
        gib_per_s: bytes of the model a second, by the median.
        limit_ratio: against the memory copy of the same run.
        raw_ratio: against the same library driven raw in the same run.
        stall_s: how long a replica did not serve, median; None for raw.
        phases: seconds by phase of the member that took longest for it, medians.
        extra_bytes: memory beyond the weights of the process that took most.
        wrong: tensors with wrong bits, over all repetitions and receivers.
    """

    backend: str
    variant: str
    bucket_size: int | None
    bytes_moved: int
    cold_s: float
    time_s: Quantiles
    cpu_s: float
    cpu_by_side: Sides
    gib_per_s: float
    limit_ratio: Ratio
    raw_ratio: Ratio | None
    stall_s: float | None
    phases: Mapping[str, float]
    extra_bytes: int | None
    wrong: int


@dataclass(frozen=True)
class Limit:
    """Each tensor copied in one process by one thread, once for each rollout worker, in turn with the others.

    ``verify_cpu_s_per_gib``: what verify=full adds on each side, measured beside it.
    """

    what: str
    time_s: Quantiles
    cpu_s: float
    gib_per_s: float
    verify_cpu_s_per_gib: float


def limit_of(warm: Sequence[Sample], nbytes: int) -> Limit:
    """Return the limit that the memory copy sets."""
    time_s = _quantiles(warm)
    what = "in-process copy of each tensor, once for each rollout worker"
    hashing = median(s.hash_cpu_s for s in warm) / (nbytes / GIB)
    return Limit(what, time_s, median(s.cpu_s for s in warm), nbytes / GIB / time_s.p50, hashing)


def row_of(
    backend: str,
    variant: str,
    bucket_size: int | None,
    reps: Sequence[Sample],
    warm: Sequence[Sample],
    *,
    nbytes: int,
    limit: Limit,
    raw: Row | None,
) -> Row:
    """Return the row of a backend.

    Args:
        reps: all repetitions, the cold one first; ``warm``: those that count.
        nbytes: of the model.
        limit: of the same run.
        raw: the row of the same library driven raw, if there is one.
    """
    time_s, cpu_s = _quantiles(warm), median(s.cpu_s for s in warm)
    stalls = [s.stall_s for s in warm if s.stall_s is not None]
    extras = [s.extra_bytes for s in reps if s.extra_bytes is not None]
    return Row(
        backend=backend,
        variant=variant,
        bucket_size=bucket_size,
        bytes_moved=int(median(s.bytes_moved for s in warm)),
        cold_s=reps[0].seconds,
        time_s=time_s,
        cpu_s=cpu_s,
        cpu_by_side=Sides(*(median(side) for side in zip(*(s.cpu_by_side for s in warm), strict=True))),
        gib_per_s=nbytes / GIB / time_s.p50,
        limit_ratio=_ratio(limit.time_s.p50, limit.cpu_s, time_s.p50, cpu_s),
        raw_ratio=_ratio(raw.time_s.p50, raw.cpu_s, time_s.p50, cpu_s) if raw else None,
        stall_s=median(stalls) if stalls else None,
        phases={phase: median(s.phases[phase] for s in warm) for phase in warm[0].phases},
        extra_bytes=max(extras) if extras else None,
        wrong=sum(s.wrong for s in reps),
    )


def rows_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, nested fields flattened (``time_s.p50``)."""
    flat = [_flat(asdict(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    # A field that one row has and another lacks is nested in the first only.
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    flat = [{name: row.get(name) for name in names} for row in flat]
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


@dataclass(frozen=True)
class Comparison:
    """A row beside the same of an earlier result; ``speed`` is new over old GiB/s."""

    backend: str
    variant: str
    bucket_size: int | None
    old_gib_per_s: float
    new_gib_per_s: float
    speed: float


def require_result(old: Mapping[str, Any], *, where: str) -> None:
    """Raise UsageError when ``old`` is not the document of a bench, with rows that can be compared."""
    rows = old.get("rows")
    if old.get("schema") != "rlctl.sync-bench/1" or not isinstance(rows, list):
        raise UsageError("this is not a result of rlctl sync-bench --json", where=where)
    for row in rows:
        speed = row.get("gib_per_s") if isinstance(row, dict) else None
        named = isinstance(row, dict) and {"backend", "variant", "bucket_size"} <= row.keys()
        if not named or not isinstance(speed, int | float) or not 0 < speed < math.inf:
            raise UsageError("a row of it has no backend, variant, bucket_size or gib_per_s above 0", where=where)


def compare(rows: Sequence[Row], old: Mapping[str, Any], *, where: str) -> list[Comparison]:
    """Return the rows that ``old``, the document of an earlier bench, has too.

    Raises UsageError when ``old`` is no such document, or has none of them.
    """
    require_result(old, where=where)
    found = []
    before = {(r["backend"], r["variant"], r["bucket_size"]): r["gib_per_s"] for r in old["rows"]}
    for row in rows:
        speed = before.get((row.backend, row.variant, row.bucket_size))
        if speed is not None:
            found.append(
                Comparison(row.backend, row.variant, row.bucket_size, speed, row.gib_per_s, row.gib_per_s / speed)
            )
    if not found:
        raise UsageError("no backend, variant and bucket size of it was measured now", where=where)
    return found


def _quantiles(samples: Sequence[Sample]) -> Quantiles:
    p50, p99 = np.quantile([s.seconds for s in samples], [0.5, 0.99])
    return Quantiles(float(p50), float(p99))


def _ratio(wall: float, cpu: float, own_wall: float, own_cpu: float) -> Ratio:
    return Ratio(wall / own_wall, cpu / own_cpu)


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return flat
