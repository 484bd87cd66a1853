"""``rlctl replay``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.errors import CheckError, UnavailableError, UsageError
from rlctl.report import Report
from rlctl.units import format_bytes

if TYPE_CHECKING:
    from rlctl.ops.replay.history import History
    from rlctl.replay.findings import Finding
    from rlctl.report.progress import Progress

EXAMPLES = {
    "rlctl replay RUN": "every recorded step at every level, R0 to R4",
    "rlctl replay RUN --step 12 --level R2": "one step trained again from the nearest checkpoint, bit for bit",
    "rlctl replay RUN --step 12 --what-if trainer.optimizer.lr=1e-6": "what it would have come to",
    "rlctl replay RUN --list": "which steps there are, what is kept of each, and its size",
    "rlctl replay RUN --show --step 12": "a step's prompts, responses, rewards, versions and segments",
    "rlctl replay RUN --html run.html": "the run as one page: timeline, samples, staleness, log-prob gaps",
    "rlctl replay RUN --diff OTHER": "the keys that differ, and the first step and stage where two runs part",
    "rlctl replay RUN --export step-12.jsonl --step 12": "its responses, for rollout.engine=recorded:step-12.jsonl",
}

_SAMPLES = 8


def main(
    report: Report,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    step: Annotated[
        str | None, typer.Option("--step", metavar="N|A:B", help="One step, or A to B; all when not given.")
    ] = None,
    anomalies: Annotated[bool, typer.Option("--anomalies", help="Only steps kept because a figure was odd.")] = False,
    level: Annotated[
        list[str] | None,
        typer.Option("--level", metavar="R0|R1|R2|R3|R4|all", help="What to live again, or R0..R2; may be repeated."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="KEY=VALUE", help="Train the steps under another setting; may be repeated."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the steps and what is kept of each.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show prompts, responses, rewards and segments.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="The same as a page.")] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, metavar="N", help="Responses of each step to show; 8 when not given."),
    ] = None,
    diff: Annotated[Path | None, typer.Option("--diff", metavar="OTHER", help="Say where two runs part.")] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE.jsonl|parquet", help="Write the responses of the steps.")
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove what is kept beyond the window.")] = False,
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, help="Steps that --prune leaves (run.record_window); 0: all.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what --prune would remove.")] = False,
) -> None:
    """Live recorded steps of a run again and compare them.

    Works offline on the run's folder; nothing in it is executed. R0: hashes hold. R1: rewards to loss, from the
    record. R2: trained again from a checkpoint. R3: tokens made again. R4: the schedule decided again. Exit code 4:
    something differs. See docs/replay.md.
    """
    from rlctl.ops.replay.choice import chosen_steps, parse_steps
    from rlctl.ops.replay.history import read_history

    asked = {
        "--list": list_,
        "--show": show or html is not None,
        "--diff": diff is not None,
        "--export": export is not None,
        "--prune": prune,
        "--level": bool(level),
        "--what-if": bool(what_if),
    }
    wanted = [name for name, given in asked.items() if given]
    if len(wanted) > 1:
        raise UsageError(f"{wanted[0]} and {wanted[1]} do not go together", fix="give one of them")
    if (keep is not None or dry_run) and not prune:
        raise UsageError("--keep and --dry-run belong to --prune")
    if samples is not None and not asked["--show"]:
        raise UsageError("--samples belongs to --show and --html")
    bounds = "--step" if step is not None else "--anomalies"
    if (step is not None or anomalies) and (prune or diff is not None):
        raise UsageError(f"{bounds} does not go with {'--prune' if prune else '--diff'}, which looks at all steps")
    first, last = parse_steps(step)
    history = read_history(run)
    if history.under_way:
        report.warn("a process is at work in the run's folder: what it has not written yet is not seen")
    if list_:
        chosen = history.known
        _list(report, history, chosen_steps(history, chosen, first, last, anomalies=anomalies) if chosen else [])
    elif diff is not None:
        _diff(report, history, read_history(diff, where="--diff"))
    elif export is not None:
        _export(report, history, chosen_steps(history, history.recorded, first, last, anomalies=anomalies), export)
    elif prune:
        _prune(report, history, keep, dry_run=dry_run)
    elif show or html is not None:
        chosen = chosen_steps(history, history.told, first, last, anomalies=anomalies)
        if html is None and step is None and not anomalies:
            chosen = chosen[-1:]  # a table of every step is a page's work
        _show(report, history, chosen, samples or _SAMPLES, html)
    else:
        _replay(report, history, (first, last), anomalies=anomalies, levels=level or ["all"], what_if=what_if or [])


def _replay(
    report: Report,
    history: History,
    bounds: tuple[int | None, int | None],
    *,
    anomalies: bool,
    levels: list[str],
    what_if: list[str],
) -> None:
    from rlctl.replay.findings import Steps
    from rlctl.replay.whole import in_order, replay_run
    from rlctl.report.replay import show_faults
    from rlctl.report.replay_findings import finding_text, show_findings, show_what_if

    steps = Steps(*bounds, anomalies)
    found: list[Finding] = []
    with ExitStack() as stack:
        bars: list[Progress] = []

        def advance(_: int, of: int) -> None:
            if not bars:
                bars.append(stack.enter_context(report.progress("replaying", of, unit="findings")))
            bars[0].advance()

        found += replay_run(history.path, steps=steps, levels=levels, what_if=what_if, on_progress=advance)
    found = in_order(found)
    report.document({**_head(history), "what_if": what_if, "results": [_result(finding) for finding in found]})
    show_faults(report, history)
    if what_if:
        show_what_if(report, found, {step: told.metrics for step, told in history.steps.items()})
    else:
        show_findings(report, found)
    differing = [finding for finding in found if finding.status == "differs"]
    if differing and not what_if:
        more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise CheckError(f"{finding_text(differing[0])}{more}")
    if all(finding.status == "unavailable" for finding in found):
        raise UnavailableError(f"nothing could be replayed here: {found[0].reason}" if found else "nothing to replay")


def _result(finding: Finding) -> dict[str, object]:
    import msgspec

    fields: dict[str, object] = msgspec.to_builtins(finding)
    return {name: value for name, value in fields.items() if value != {} and (value != "" or name == "reason")}


def _list(report: Report, history: History, steps: list[int]) -> None:
    from rlctl.ops.replay.listing import list_run
    from rlctl.report.replay import show_listing

    listing = list_run(history, steps)
    report.document({**_head(history), **listing.document()})
    show_listing(report, history, listing)


def _show(report: Report, history: History, steps: list[int], samples: int, html: Path | None) -> None:
    from rlctl.ops.output_place import require_place
    from rlctl.ops.replay.showing import show_run
    from rlctl.report.replay import show_steps

    require_place(html, "--html")
    with report.progress("reading", len(steps), unit="steps") as progress:
        shown = show_run(history, steps, samples, progress.advance)
    if html is None:
        report.document({**_head(history), "page": None, **shown.document()})
        show_steps(report, shown)
        return
    from rlctl.report.replay_page import save_page

    size = save_page(html, shown)
    report.document({**_head(history), "page": {"file": str(html), "bytes": size}, **shown.document()})
    report.text(f"{html}: {len(steps)} steps, {format_bytes(size)}")


def _diff(report: Report, this: History, other: History) -> None:
    from rlctl.ops.replay.diff import compare_runs
    from rlctl.report.replay import parting_text, show_difference

    found = compare_runs(this, other)
    report.document({**_head(this), "other": str(other.path), **found.document()})
    show_difference(report, this, other, found)
    if not found.equal:
        keys = ", ".join(difference.key for difference in found.config)
        said = [f"keys {keys}" if keys else "", parting_text(found.parting) if found.parting is not None else ""]
        more = "one has steps that the other has not" if any(found.only.values()) else ""
        raise CheckError("the runs differ: " + "; ".join(filter(None, [*said, more])))


def _export(report: Report, history: History, steps: list[int], path: Path) -> None:
    from rlctl.ops.replay.trajectories import export, require_export

    require_export(path)
    with report.progress("exporting", len(steps), unit="steps") as progress:
        count = export(history, steps, path, progress.advance)
    size = path.stat().st_size
    report.document({**_head(history), "file": str(path), "steps": steps, "responses": count, "bytes": size})
    report.text(f"{path}: {count} responses of {len(steps)} steps, {format_bytes(size)}")


def _prune(report: Report, history: History, keep: int | None, *, dry_run: bool) -> None:
    from rlctl.ops.replay.pruning import prune

    found = prune(history, keep, dry_run=dry_run)
    report.document({**_head(history), "dry_run": dry_run, "removed": found})
    report.table(
        ["what", "of steps"],
        [
            ["records", ", ".join(map(str, found.records)) or None],
            ["checkpoints", ", ".join(map(str, found.checkpoints)) or None],
        ],
    )
    would = "would free" if dry_run else "freed"
    kept = f"the last {found.window} steps" if found.window else "all steps"
    report.text(f"{would} {format_bytes(found.nbytes)}; {kept}, what leads to them and what is pinned stay")


def _head(history: History) -> dict[str, object]:
    return {
        "run": str(history.path),
        "mode": history.mode,
        "under_way": history.under_way,
        "faults": [{"file": fault.file.name, "what": fault.what} for fault in history.faults],
        "results": [],
    }
