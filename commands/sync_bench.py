"""``rlctl sync-bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlctl.errors import CheckError, RlctlError, UsageError
from rlctl.report import Report
from rlctl.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rlctl.ops.sync_bench import BenchResult
    from rlctl.ops.sync_bench_choice import Unavailable
    from rlctl.ops.sync_bench_rows import Row

EXAMPLES = {
    "rlctl sync-bench": "every transport that runs on this machine, 1 GiB",
    "rlctl sync-bench --backend gloo --model qwen2.5-0.5b --rollouts 2": "the tensors of a model, to two workers",
    "rlctl sync-bench --backend gloo --raw --fail-below 0.05": "a check for CI",
    "rlctl sync-bench --backend gloo --delta --change 2%": "what sending only changes saves",
}


def main(
    report: Report,
    backend: Annotated[
        str, typer.Option("--backend", metavar="NAME[,NAME]|all", help="Transports to measure.")
    ] = "all",
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR|PRESET", help="Take a model's tensors, such as qwen2.5-0.5b.")
    ] = None,
    size: Annotated[str, typer.Option("--size", help="Bytes of all tensors, without --model.")] = "1GiB",
    tensors: Annotated[int, typer.Option("--tensors", min=1, help="Number of tensors, without --model.")] = 256,
    trainers: Annotated[int, typer.Option("--trainers", min=1, help="Trainer ranks; all of them send.")] = 1,
    rollouts: Annotated[int, typer.Option("--rollouts", min=1, help="Rollout workers.")] = 1,
    bucket: Annotated[str, typer.Option("--bucket", metavar="SIZE[,SIZE]", help="Sizes of a bucket.")] = "64MiB",
    iters: Annotated[int, typer.Option("--iters", min=1, help="Repetitions that count.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Repetitions after the cold one that do not.")] = 1,
    delta: Annotated[bool, typer.Option("--delta", help="Measure sending only what changed, too.")] = False,
    change: Annotated[
        str | None, typer.Option("--change", help="Share of the elements that each step changes (2% with --delta).")
    ] = None,
    verify: Annotated[
        Literal["full", "sampled", "off"], typer.Option("--verify", help="What the sync itself hashes.")
    ] = "full",
    raw: Annotated[bool, typer.Option("--raw", help="Drive the same libraries without rlctl, too.")] = False,
    fail_below: Annotated[
        float | None,
        typer.Option("--fail-below", metavar="RATIO", help="Exit 4 under this share of the memory copy's speed."),
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
) -> None:
    """Measure how fast fresh weights reach the rollout engines.

    Trainers and rollout workers are processes of their own. Before each repetition the weights change; after it every
    bit is compared, outside the time. Transports take turns, a plain memory copy among them; see docs/sync-bench.md.
    """
    # Imported here: they load torch, which --help does not need.
    from rlctl.ops.sync_bench import BenchOptions, repetitions, run_bench
    from rlctl.ops.sync_bench_choice import choose_backends
    from rlctl.ops.sync_bench_rows import rows_csv
    from rlctl.ops.sync_bench_workload import equal_tensors, model_tensors

    names = [name.strip() for name in backend.split(",") if name.strip()]
    chosen, unavailable = choose_backends(names)
    if csv and report.json:
        raise UsageError("--csv and --json exclude each other")
    options = BenchOptions(
        backends=chosen,
        tensors=model_tensors(model) if model is not None else equal_tensors(_bytes(size, "--size"), tensors),
        trainers=trainers,
        rollouts=rollouts,
        buckets=[_bytes(part, "--bucket") for part in bucket.split(",")],
        iters=iters,
        warmup=warmup,
        delta=delta,
        change=_share(change if change is not None else "2%" if delta else "100%"),
        verify=verify,
        raw=raw,
    )
    with report.progress("syncing", repetitions(options), unit="repetitions") as progress:
        result = run_bench(options, progress.advance)
    report.document(result.document(unavailable))
    if csv:
        report.text(rows_csv(result.rows))
    else:
        _show(report, result, unavailable)
    _check(result, fail_below)


def _show(report: Report, result: BenchResult, unavailable: list[Unavailable]) -> None:
    o = result.options
    report.text(
        f"# {format_bytes(result.weights_bytes)} in {len(o.tensors)} tensors, {o.trainers} trainer(s), "
        f"{o.rollouts} rollout worker(s), {o.iters} repetitions after 1 cold and {o.warmup} more, verify {o.verify}"
    )
    headers = ["backend", "variant", "bucket", "moved", "cold s", "p50 s", "p99 s", "GiB/s", "CPU s", "% copy",
               "% copy CPU", "% raw", "% raw CPU", "stall s", "extra memory", "#wrong"]  # fmt: skip
    limit = result.limit
    copy = ["(copy)", "limit", None, None, None, limit.time_s.p50, limit.time_s.p99, limit.gib_per_s, limit.cpu_s,
            "100%", "100%", None, None, None, None, None]  # fmt: skip
    report.table(headers, [*map(_cells, result.rows), copy])
    phases = [[r.backend, r.variant, *r.phases.values()] for r in result.rows if r.phases]
    if phases:
        names = next(list(r.phases) for r in result.rows if r.phases)
        report.table(["backend", "variant", *(f"{name} s" for name in names)], phases)
    for absent in unavailable:
        report.text(f"not run: {absent.backend}: {absent.reason}; {absent.remedy}")


def _cells(row: Row) -> list[object]:
    bucket = format_bytes(row.bucket_size) if row.bucket_size else None
    extra = format_bytes(row.extra_bytes) if row.extra_bytes is not None else None
    against_raw = [f"{row.raw_ratio.wall:.0%}", f"{row.raw_ratio.cpu:.0%}"] if row.raw_ratio else [None, None]
    return [
        row.backend, row.variant, bucket, format_bytes(row.bytes_moved), row.cold_s, row.time_s.p50, row.time_s.p99,
        row.gib_per_s, row.cpu_s, f"{row.limit_ratio.wall:.0%}", f"{row.limit_ratio.cpu:.0%}", *against_raw,
        row.stall_s, extra, row.wrong,
    ]  # fmt: skip


def _check(result: BenchResult, fail_below: float | None) -> None:
    if result.failed:
        broken = "; ".join(f"{f.backend} ({f.variant}): {f.error}" for f in result.failed)
        raise RlctlError(f"broke while it was measured: {broken}")
    wrong = [f"{row.backend} ({row.variant}): {row.wrong}" for row in result.rows if row.wrong]
    if wrong:
        raise CheckError(f"tensors arrived with wrong bits: {', '.join(wrong)}")
    if fail_below is None:
        return
    slow = [
        f"{row.backend} ({row.variant}) {row.limit_ratio.wall:.3f}"
        for row in result.rows
        if row.limit_ratio.wall < fail_below
    ]
    if slow:
        raise CheckError(f"slower than {fail_below:g} of the memory copy: {', '.join(slow)}", where="--fail-below")


def _bytes(text: str, where: str) -> int:
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise UsageError(str(error), where=where) from error
    if found < 1:
        raise UsageError("must be above 0", where=where)
    return found


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a share; write 2% or 0.02", where="--change") from error
    if not 0 < share <= 1:
        raise UsageError(f"{text!r} is not above 0 and at most 1", where="--change")
    return share
