"""``rlctl sync-bench``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.errors import UsageError
from rlctl.keys.json_file import read_object
from rlctl.ops.sync_bench_arguments import (
    bucket_sizes,
    engine_options,
    ratio_of,
    require_file,
    seconds_of,
    share_of,
    size_of,
)
from rlctl.report import Report
from rlctl.report.plots import require_plot
from rlctl.report.sync_bench import bars, show_bench, show_comparison, show_simulation
from rlctl.report.sync_plot import save_sync_plot
from rlctl.units import format_bytes

EXAMPLES = {
    "rlctl sync-bench": "every transport that runs on this machine, 1 GiB",
    "rlctl sync-bench --backend gloo --model qwen2.5-0.5b --rollouts 2": "the tensors of a model, to two workers",
    "rlctl sync-bench --backend gloo -b 1MiB -e 256MiB -f 4": "which size of a bucket is best",
    "rlctl sync-bench --backend gloo --raw --fail-below 0.05": "a check for CI",
    "rlctl sync-bench --listen 10.0.0.7:5555": "across hosts; it says what to run on the other",
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
    bucket: Annotated[
        str | None, typer.Option("--bucket", metavar="SIZE[,SIZE]", help="Sizes of a bucket.  [default: 64MiB]")
    ] = None,
    begin: Annotated[
        str | None, typer.Option("-b", "--begin", metavar="SIZE", help="Sweep: smallest bucket (1MiB).")
    ] = None,
    end: Annotated[str | None, typer.Option("-e", "--end", metavar="SIZE", help="Sweep: largest bucket.")] = None,
    factor: Annotated[
        float | None, typer.Option("-f", "--factor", metavar="N", help="Sweep: from one bucket to the next (4).")
    ] = None,
    iters: Annotated[int, typer.Option("--iters", min=1, help="Repetitions that count.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Repetitions after the cold one that do not.")] = 1,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="BACKEND.NAME=VALUE", help="An option of one transport; may be repeated."),
    ] = None,
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
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg|png", help="Draw the speeds.")] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="Run the trainers; the other host comes by --connect."),
    ] = None,
    connect: Annotated[
        str | None,
        typer.Option("--connect", metavar="HOST:PORT", help="Run the rollout workers for the host that listens there."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Secret that both hosts know (or $RLCTL_BENCH_TOKEN)."),
    ] = None,
    wait: Annotated[str, typer.Option("--wait", help="How long to wait for the other host.")] = "5min",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Predict --model in the layout of --profile; nothing is moved.")
    ] = False,
    profile: Annotated[str | None, typer.Option("--profile", help="Hardware to predict for.")] = None,
) -> None:
    """Measure how fast fresh weights reach the rollout engines.

    Trainers and rollout workers are processes of their own. Before each repetition the weights change; after it every
    bit is compared, outside the time. Transports take turns, a plain memory copy among them; see docs/sync-bench.md.
    """
    given: dict[str, object] = {
        "--backend": backend != "all", "--size": size != "1GiB", "--tensors": tensors != 256, "--option": option,
        "--trainers": trainers != 1, "--rollouts": rollouts != 1, "--iters": iters != 5, "--warmup": warmup != 1,
        "--delta": delta, "--change": change, "--verify": verify != "full", "--raw": raw, "--compare": compare,
        "--fail-below": fail_below is not None, "--csv": csv, "--plot": plot, "--listen": listen,
    }  # fmt: skip
    layout = {"--model": model, "--bucket": bucket or begin or end or factor, "--profile": profile}
    if connect is not None:
        _refuse("--connect", given | layout | {"--simulate": simulate}, "the listening side decides what is measured")
        _connect(report, connect, token_file, seconds_of(wait, "--wait"))
        return
    if simulate:
        _refuse("--simulate", given, "it takes --model, --profile and --bucket")
        if model is None or profile is None:
            raise UsageError("--simulate needs --model and --profile")
        _simulate(report, profile, model, bucket_sizes(bucket, begin, end, factor)[0])
        return
    if profile is not None:
        raise UsageError("--profile is for --simulate: a bench measures this machine", where="--profile")
    _require_files(report, csv, plot, compare)
    _require_hosts(listen, raw, token_file)
    limit, buckets = ratio_of(fail_below), bucket_sizes(bucket, begin, end, factor)
    old = read_object(compare) if compare is not None else None
    # Imported here: they load torch, which --help does not need.
    from rlctl.ops.sync_bench import check, notes, plan_bench, repetitions, run_bench
    from rlctl.ops.sync_bench_choice import choose_backends
    from rlctl.ops.sync_bench_hosts import other_host
    from rlctl.ops.sync_bench_link import parse_address
    from rlctl.ops.sync_bench_options import BenchOptions
    from rlctl.ops.sync_bench_rows import compare as compare_rows
    from rlctl.ops.sync_bench_rows import require_result, rows_csv
    from rlctl.ops.sync_bench_workload import equal_tensors, model_tensors

    if old is not None:
        require_result(old, where=str(compare))
    names = [name.strip() for name in backend.split(",") if name.strip()]
    tensor_list = model_tensors(model) if model is not None else equal_tensors(size_of(size, "--size"), tensors)
    share = share_of(change if change is not None else "2%" if delta else "100%")
    extras = engine_options(option or [], names)
    # Known before the other host is waited for.
    chosen, unavailable = choose_backends(names, across=listen is not None, extras=extras)
    with ExitStack() as stack:
        other = None
        if listen is not None:
            address = parse_address(listen, where="--listen")
            wait_s = seconds_of(wait, "--wait")
            other = stack.enter_context(other_host(address, token_file, wait_s, report.line))
            chosen, unavailable = choose_backends(names, across=True, extras=extras, elsewhere=other.survey)
        options = BenchOptions(
            backends=chosen,
            tensors=tensor_list,
            trainers=trainers,
            rollouts=rollouts,
            buckets=buckets,
            iters=iters,
            warmup=warmup,
            delta=delta,
            change=share,
            verify=verify,
            raw=raw,
            extras=extras,
        )
        parts = plan_bench(options, other)
        for note in notes(options, parts):
            report.line(f"note: {note}")
        with report.progress("syncing", repetitions(options, parts)) as progress:
            result = run_bench(options, parts, progress.advance, other)
    comparison = compare_rows(result.rows, old, where=str(compare)) if old is not None else []
    report.document({**result.document(unavailable), "comparison": [asdict(c) for c in comparison]})
    if csv:
        report.text(rows_csv(result.rows))
    else:
        show_bench(report, result, unavailable)
        show_comparison(report, comparison)
    if plot is not None and result.rows:
        title = f"weight sync, {format_bytes(result.weights_bytes)}"
        save_sync_plot(plot, bars(result.rows), result.limit.gib_per_s, title=title)
    check(result, limit, comparison)


def _require_files(report: Report, csv: bool, plot: Path | None, compare: Path | None) -> None:
    if csv and report.json:
        raise UsageError("--csv and --json exclude each other")
    require_plot(plot)
    require_file(compare, "--compare")


def _require_hosts(listen: str | None, raw: bool, token_file: Path | None) -> None:
    if listen is not None and raw:
        raise UsageError("--raw drives libraries on one host", where="--raw", fix="leave out --raw or --listen")
    if listen is None and token_file is not None:
        raise UsageError("a token is for --listen and --connect", where="--token-file")


def _refuse(option: str, others: Mapping[str, object], fix: str) -> None:
    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(f"{option} does not go with {', '.join(given)}", where=option, fix=fix)


def _connect(report: Report, address: str, token_file: Path | None, wait: float) -> None:
    from rlctl.ops.sync_bench_hosts import serve_rollouts
    from rlctl.ops.sync_bench_link import parse_address

    done = serve_rollouts(parse_address(address, where="--connect"), token_file, wait, report.line)
    report.document(done)
    backends = ", ".join(done["backends"]) or "no backend"
    report.text(f"rollout workers for {backends}: {done['receipts']} receipts; the figures are on the listening host")


def _simulate(report: Report, profile: str, model: str, bucket: int) -> None:
    from rlctl.ops.sync_bench_simulate import simulate

    found = simulate(profile, model, bucket=bucket)
    report.document({"simulation": found.document()})
    show_simulation(report, found)
