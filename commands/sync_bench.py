"""``rlctl sync-bench``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlctl.errors import CheckError, RlctlError, UnavailableError, UsageError
from rlctl.keys.json_file import read_object
from rlctl.report import Report
from rlctl.report.plots import can_plot
from rlctl.report.sync_plot import save_sync_plot
from rlctl.units import format_bytes, format_duration, parse_bytes

if TYPE_CHECKING:
    from rlctl.ops.sync_bench import BenchResult
    from rlctl.ops.sync_bench_choice import Unavailable
    from rlctl.ops.sync_bench_public import PublicFigure
    from rlctl.ops.sync_bench_rows import Comparison, Row

EXAMPLES = {
    "rlctl sync-bench": "every transport that runs on this machine, 1 GiB",
    "rlctl sync-bench --backend gloo --model qwen2.5-0.5b --rollouts 2": "the tensors of a model, to two workers",
    "rlctl sync-bench --backend gloo --raw --fail-below 0.05": "a check for CI",
    "rlctl sync-bench --simulate --profile 64xH100-separate --model qwen3-235b-a22b": "a prediction for other hardware",
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
        typer.Option(
            "--fail-below",
            metavar="RATIO",
            help="Exit 4 under this share of the memory copy's (with --compare: the old) speed.",
        ),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", metavar="OLD.json", help="Set beside an earlier --json result.")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the speeds.")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Predict --model in the layout of --profile; nothing is moved.")
    ] = False,
    profile: Annotated[str | None, typer.Option("--profile", help="Hardware to predict for.")] = None,
) -> None:
    """Measure how fast fresh weights reach the rollout engines.

    Trainers and rollout workers are processes of their own. Before each repetition the weights change; after it every
    bit is compared, outside the time. Transports take turns, a plain memory copy among them; see docs/sync-bench.md.
    """
    if simulate:
        if model is None or profile is None:
            raise UsageError("--simulate needs --model and --profile")
        _simulate(report, profile, model, _bytes(bucket, "--bucket"))
        return
    if profile is not None:
        raise UsageError("--profile is for --simulate: a bench measures this machine", where="--profile")
    # Imported here: they load torch, which --help does not need.
    from rlctl.ops.sync_bench import plan_bench, repetitions, run_bench
    from rlctl.ops.sync_bench_choice import choose_backends
    from rlctl.ops.sync_bench_options import BenchOptions
    from rlctl.ops.sync_bench_raw import RAW
    from rlctl.ops.sync_bench_rows import compare as compare_rows
    from rlctl.ops.sync_bench_rows import rows_csv
    from rlctl.ops.sync_bench_workload import equal_tensors, model_tensors

    names = [name.strip() for name in backend.split(",") if name.strip()]
    chosen, unavailable = choose_backends(names)
    if csv and report.json:
        raise UsageError("--csv and --json exclude each other")
    if plot is not None and not can_plot():
        raise UnavailableError("--plot needs matplotlib", where="--plot", fix="pip install 'rlctl[plots]'")
    old = read_object(compare) if compare is not None else None
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
    if raw and set(chosen) - set(RAW):
        report.line(f"note: no raw figure for {', '.join(n for n in chosen if n not in RAW)}")
    parts = plan_bench(options)
    if len(parts) > 1:
        report.line(f"note: the memory holds not all at once: {len(parts)} groups, each beside its own memory copy")
    with report.progress("syncing", repetitions(options, parts)) as progress:
        result = run_bench(options, parts, progress.advance)
    comparison = compare_rows(result.rows, old, where=str(compare)) if old is not None else []
    report.document({**result.document(unavailable), "comparison": [asdict(c) for c in comparison]})
    if plot is not None and result.rows:
        bars = [
            (" ".join(filter(None, (row.backend, row.variant, _size(row.bucket_size)))), row.gib_per_s)
            for row in result.rows
        ]
        save_sync_plot(plot, bars, result.limit.gib_per_s, title=f"weight sync, {format_bytes(result.weights_bytes)}")
    if csv:
        report.text(rows_csv(result.rows))
    else:
        _show(report, result, unavailable)
    if comparison and not csv:
        report.table(
            ["backend", "variant", "bucket", "old GiB/s", "new GiB/s", "new / old"],
            [
                [c.backend, c.variant, _size(c.bucket_size), c.old_gib_per_s, c.new_gib_per_s, f"{c.speed:.0%}"]
                for c in comparison
            ],
        )
    check(result, fail_below, comparison)


def _simulate(report: Report, profile: str, model: str, bucket: int) -> None:
    from rlctl.ops.sync_bench_simulate import simulate

    s = simulate(profile, model, bucket=bucket)
    report.document({"simulation": s.document()})
    report.text(f"# PREDICTION, nothing was moved: {model} ({format_bytes(s.weights)}) in the layout of {profile}")
    rows: list[list[object]] = [
        ["trainer", s.train],
        ["rollout", s.rollout],
        ["bytes between devices", format_bytes(s.moved)],
        ["weights on a rollout device", format_bytes(s.wanted_by_rank)],
        ["transfer, all ranks send what is needed", f"{format_duration(s.seconds)} (set by {s.bottleneck})"],
        ["transfer, one rank broadcasts all", format_duration(s.one_sender_s)],
    ]
    report.table(["what", "predicted"], rows)
    if not s.fits:
        report.text(
            f"does not fit: a rollout device has {format_bytes(s.device_memory)}; this layout is arithmetic only"
        )
    if s.public:
        headers = ["published s", "trainer + rollout devices", "about as many", "set-up", "source"]
        report.table(headers, [[f.seconds, _devices(f), near, f.what, f.source] for f, near in s.public])


def _devices(figure: PublicFigure) -> str:
    return f"{figure.trainer_devices} + {figure.rollout_devices}" if figure.trainer_devices else "not stated"


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
    phases = [[r.backend, r.variant, _size(r.bucket_size), *r.phases.values()] for r in result.rows if r.phases]
    if phases:
        names = next(list(r.phases) for r in result.rows if r.phases)
        report.table(["backend", "variant", "bucket", *(f"{name} s" for name in names)], phases)
    for absent in unavailable:
        report.text(f"not run: {absent.backend}: {absent.reason}; {absent.remedy}")


def _cells(row: Row) -> list[object]:
    extra = format_bytes(row.extra_bytes) if row.extra_bytes is not None else None
    against_raw = [f"{row.raw_ratio.wall:.0%}", f"{row.raw_ratio.cpu:.0%}"] if row.raw_ratio else [None, None]
    return [
        row.backend, row.variant, _size(row.bucket_size), format_bytes(row.bytes_moved), row.cold_s,
        row.time_s.p50, row.time_s.p99, row.gib_per_s, row.cpu_s,
        f"{row.limit_ratio.wall:.0%}", f"{row.limit_ratio.cpu:.0%}", *against_raw,
        row.stall_s, extra, row.wrong,
    ]  # fmt: skip


def _size(nbytes: int | None) -> str | None:
    return None if nbytes is None else format_bytes(nbytes)


def check(result: BenchResult, fail_below: float | None, comparison: Sequence[Comparison]) -> None:
    """Raise CheckError for wrong bits and for what is too slow, RlctlError when a backend broke."""
    if result.failed:
        broken = "; ".join(f"{f.backend} ({f.variant}): {f.error}" for f in result.failed)
        raise RlctlError(f"broke while it was measured: {broken}")
    wrong = [f"{row.backend} ({row.variant}): {row.wrong}" for row in result.rows if row.wrong]
    if wrong:
        raise CheckError(f"tensors arrived with wrong bits: {', '.join(wrong)}")
    if fail_below is None:
        return
    against = "the old result" if comparison else "the memory copy"
    ratios = [(c.backend, c.variant, c.speed) for c in comparison] or [
        (row.backend, row.variant, row.limit_ratio.wall) for row in result.rows
    ]
    slow = [f"{backend} ({variant}) {ratio:.3f}" for backend, variant, ratio in ratios if ratio < fail_below]
    if slow:
        raise CheckError(f"slower than {fail_below:g} of {against}: {', '.join(slow)}", where="--fail-below")


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
