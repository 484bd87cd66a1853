"""``rlctl replay``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.errors import CheckError, UsageError
from rlctl.report import Report

if TYPE_CHECKING:
    from rlctl.ops.replay.history import History

EXAMPLES = {
    "rlctl replay RUN --list": "which steps there are, what is kept of each, and its size",
    "rlctl replay RUN --show --step 12": "a step's prompts, responses, rewards, versions and segments",
    "rlctl replay RUN --html run.html": "the run as one page: timeline, samples, staleness, log-prob gaps",
    "rlctl replay RUN --diff OTHER": "the keys that differ, and the first step and stage where two runs part",
}


def main(
    report: Report,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    step: Annotated[str | None, typer.Option("--step", metavar="N|A:B", help="One step, or A to B.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the steps and what is kept of each.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show prompts, responses, rewards and segments.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="The same as a page.")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Responses of each step to show.")] = 8,
    diff: Annotated[Path | None, typer.Option("--diff", metavar="OTHER", help="Say where two runs part.")] = None,
) -> None:
    """Live recorded steps of a run again and compare them.

    Works offline on the run's folder; nothing in it is executed. Exit code 4: something differs. See docs/replay.md.
    """
    from rlctl.ops.replay.choice import parse_steps
    from rlctl.ops.replay.history import read_history

    asked = {"--list": list_, "--show, --html": show or html is not None, "--diff": diff is not None}
    wanted = [name for name, given in asked.items() if given]
    if len(wanted) > 1:
        raise UsageError(f"{wanted[0]} and {wanted[1]} do not go together", fix="give one of them")
    if not wanted:
        raise UsageError("nothing to do", fix=f"give one of {', '.join(asked)}")
    first, last = parse_steps(step)
    history = read_history(run)
    if list_:
        _list(report, history)
    elif diff is not None:
        _diff(report, history, read_history(diff, where="--diff"))
    else:
        _show(report, history, first, last, samples, html)


def _list(report: Report, history: History) -> None:
    from rlctl.ops.replay.listing import list_run
    from rlctl.report.replay import show_listing

    listing = list_run(history)
    report.document({**_head(history), **listing.document()})
    show_listing(report, history, listing)


def _show(
    report: Report, history: History, first: int | None, last: int | None, samples: int, html: Path | None
) -> None:
    from rlctl.ops.output_place import require_place
    from rlctl.ops.replay.showing import chosen_steps, show_run
    from rlctl.report.replay import show_steps

    if html is not None:
        require_place(html, "--html")
    chosen = chosen_steps(history, first, last)
    if first is None and last is None and html is None:
        first = chosen[-1]  # a table of every step is a page's work
    with report.progress("reading", len(chosen_steps(history, first, last)), unit="steps") as progress:
        shown = show_run(history, first, last, samples, progress.advance)
    page = None
    if html is not None:
        from rlctl.report.replay_page import save_page

        page = {"file": str(html), "bytes": save_page(html, shown)}
        report.line(f"page: {html}")
    report.document({**_head(history), "page": page, **shown.document()})
    if page is None:
        show_steps(report, shown)


def _diff(report: Report, this: History, other: History) -> None:
    from rlctl.ops.replay.diff import compare_runs
    from rlctl.report.replay import parting_text, show_difference

    found = compare_runs(this, other)
    report.document({**_head(this), "other": str(other.path), **found.document()})
    show_difference(report, this, other, found)
    if not found.equal:
        keys = ", ".join(difference.key for difference in found.config)
        said = [f"keys: {keys}" if keys else "", parting_text(found.parting) if found.parting is not None else ""]
        raise CheckError("the runs differ: " + "; ".join(filter(None, said)) if any(said) else "the runs differ")


def _head(history: History) -> dict[str, object]:
    return {
        "run": str(history.path),
        "mode": history.mode,
        "faults": [{"file": fault.file.name, "what": fault.what} for fault in history.faults],
        "results": [],
    }
