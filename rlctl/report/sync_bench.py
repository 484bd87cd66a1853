"""What a sync bench shows to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlctl.report.output import Report
from rlctl.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rlctl.ops.sync_bench import BenchResult
    from rlctl.ops.sync_bench_choice import Unavailable
    from rlctl.ops.sync_bench_public import PublicFigure
    from rlctl.ops.sync_bench_rows import Comparison, Row
    from rlctl.ops.sync_bench_simulate import Simulation

_HEADERS = ["backend", "variant", "bucket", "moved", "cold s", "p50 s", "p99 s", "GiB/s", "CPU s", "% copy",
            "% copy CPU", "% raw", "% raw CPU", "stall s", "extra memory", "#wrong"]  # fmt: skip


def show_bench(report: Report, result: BenchResult, unavailable: Sequence[Unavailable]) -> None:
    """Print the rows, the phases, and why the rest is not there."""
    o, limit = result.options, result.limit
    where = f" on {result.other_host}" if result.other_host else ""
    report.text(
        f"# {format_bytes(result.weights_bytes)} in {len(o.tensors)} tensors, {o.trainers} trainer(s), "
        f"{o.rollouts} rollout worker(s){where}, {o.iters} repetitions after 1 cold and {o.warmup} more, "
        f"verify {o.verify}, {o.change:.4g} of the elements change"
    )
    copy = ["(copy)", "limit", None, None, None, limit.time_s.p50, limit.time_s.p99, limit.gib_per_s, limit.cpu_s,
            "100%", "100%", None, None, None, None, None]  # fmt: skip
    report.table(_HEADERS, [*map(_cells, result.rows), copy])
    timed = [row for row in result.rows if row.phases]
    if timed:
        names = list(timed[0].phases)
        rows = [[r.backend, r.variant, size(r.bucket_size), *(r.phases.get(n) for n in names)] for r in timed]
        report.table(["backend", "variant", "bucket", *(f"{name} s" for name in names)], rows)
    report.text(
        f"verify full costs {limit.verify_cpu_s_per_gib:.4f} CPU s for each GiB on each side, measured beside the copy"
    )
    for absent in unavailable:
        report.text(f"not run: {absent.backend}: {absent.reason}; {absent.remedy}")


def show_comparison(report: Report, comparison: Sequence[Comparison]) -> None:
    """Print the rows beside those of an earlier result."""
    if comparison:
        report.table(
            ["backend", "variant", "bucket", "old GiB/s", "new GiB/s", "new / old"],
            [
                [c.backend, c.variant, size(c.bucket_size), c.old_gib_per_s, c.new_gib_per_s, f"{c.speed:.0%}"]
                for c in comparison
            ],
        )


def show_simulation(report: Report, s: Simulation) -> None:
    """Print a prediction and the published times of the same model."""
    report.text(f"# PREDICTION, nothing was moved: {s.model} ({format_bytes(s.weights)}) in the layout of {s.profile}")
    rows: list[list[object]] = [
        ["trainer", s.train],
        ["rollout", s.rollout],
        ["weights on a rollout device", format_bytes(s.wanted_by_rank)],
    ]
    ways = {"whole": "whole tensors to each replica", "slices": "slices to each rank"}
    for delivery, found in s.predicted.items():
        mark = ", as this profile's engine takes them" if delivery == s.delivery else ""
        seconds = f"{format_duration(found.seconds)} (set by {found.bottleneck})"
        rows.append([f"{ways[delivery]}{mark}", f"{seconds}, {format_bytes(found.moved)} between devices"])
    rows.append(["one rank broadcasts all", format_duration(s.one_sender_s)])
    report.table(["what", "predicted"], rows)
    if not s.fits:
        report.text(
            f"does not fit: a rollout device has {format_bytes(s.device_memory)}; this layout is arithmetic only"
        )
    if s.public:
        headers = ["published s", "trainer + rollout devices", "about as many", "set-up", "source"]
        report.table(headers, [[f.seconds, _devices(f), near, f.what, f.source] for f, near in s.public])


def bars(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Return a label and the GiB/s of each row, for the picture. Bucket sizes are named where they differ."""
    swept = len({row.bucket_size for row in rows if row.bucket_size is not None}) > 1
    return [
        (" ".join(filter(None, (row.backend, row.variant, size(row.bucket_size) if swept else None))), row.gib_per_s)
        for row in rows
    ]


def size(nbytes: int | None) -> str | None:
    """Return bytes in words, None for None."""
    return None if nbytes is None else format_bytes(nbytes)


def _cells(row: Row) -> list[object]:
    against_raw = [f"{row.raw_ratio.wall:.0%}", f"{row.raw_ratio.cpu:.0%}"] if row.raw_ratio else [None, None]
    return [
        row.backend, row.variant, size(row.bucket_size), format_bytes(row.bytes_moved), row.cold_s,
        row.time_s.p50, row.time_s.p99, row.gib_per_s, row.cpu_s,
        f"{row.limit_ratio.wall:.0%}", f"{row.limit_ratio.cpu:.0%}", *against_raw,
        row.stall_s, size(row.extra_bytes), row.wrong,
    ]  # fmt: skip


def _devices(figure: PublicFigure) -> str:
    return f"{figure.trainer_devices} + {figure.rollout_devices}" if figure.trainer_devices else "not stated"
