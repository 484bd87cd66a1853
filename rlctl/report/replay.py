"""What a replay shows to people on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlctl.report.curve import format_sparkline
from rlctl.report.output import Report
from rlctl.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rlctl.experience.records.manifest import Failure
    from rlctl.ops.replay.diff import RunDifference
    from rlctl.ops.replay.history import History
    from rlctl.ops.replay.listing import ListedStep, Listing
    from rlctl.ops.replay.parting import Parting
    from rlctl.ops.replay.samples import Sample
    from rlctl.ops.replay.showing import Shown, ShownStep
    from rlctl.ops.replay.timeline import Timeline

_TEXT = 60
_LINE = 64
_GAPS = 24


def show_listing(report: Report, history: History, listing: Listing) -> None:
    """Print the steps, what is kept of each, and its size."""
    report.text(f"# {history.path}: {history.mode}, {len(history.attempts)} attempt(s)")
    report.table(
        ["step", "attempt", "samples", "kept", "size", "reward", "loss", "grad norm", "stale", "gap", "anomaly"],
        [
            [s.step, s.attempt, s.samples or None, " ".join(s.kept), format_bytes(s.nbytes) if s.nbytes else None,
             *(s.figures.get(name) for name in ("reward", "loss", "grad_norm", "staleness", "logprob_gap")),
             _odd(s)]
            for s in listing.steps
        ],
    )  # fmt: skip
    report.text("on disk: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in listing.sizes.items() if size))
    show_faults(report, history)


def _odd(step: ListedStep) -> str | None:
    failed = f"it {failure_text(step.failure)}" if step.failure is not None else "" if step.ended else "it has no end"
    return "; ".join(step.anomaly) or failed or None


def failure_text(failure: Failure) -> str:
    """Return where a step failed and what it said."""
    where = f"local update {failure.round + 1}, " if failure.round else ""
    return f"failed in {where}stage {failure.stage}: {failure.message}"


def show_faults(report: Report, history: History) -> None:
    """Warn of what could not be read."""
    for fault in history.faults:
        report.warn(f"{fault.file.name}: {fault.what}; the rest is used")


def show_steps(report: Report, shown: Shown) -> None:
    """Print the timeline and the samples of each step."""
    show_timeline(report, shown.timeline)
    for step in shown.steps:
        _step(report, step)
    show_faults(report, shown.history)


def show_timeline(report: Report, line: Timeline) -> None:
    """Print one line of characters for the trainer, the syncs and each replica."""
    report.text(f"\ntimeline of {format_duration(line.seconds)}")
    lanes = [
        [lane.name, _lane(line, index), f"{lane.busy / line.seconds:.0%}"] for index, lane in enumerate(line.lanes)
    ]
    report.table(["who", "when", "busy"], lanes)
    letters = {_letter(span.what): span.what for lane in line.lanes[:1] for span in lane.spans}
    named = ", ".join(f"{letter} {what}" for letter, what in letters.items())
    report.text(f"{named}; S a weight sync; digits: the last of the version that generates")


def _lane(line: Timeline, index: int) -> str:
    """Return what fills most of each cell of a lane."""
    lane, letters, shares = line.lanes[index], ["."] * _LINE, [0.0] * _LINE
    width = line.seconds / _LINE
    for span in lane.spans:
        letter = _letter(span.what) if index == 0 else str((span.version or 0) % 10) if span.tokens else "S"
        first = max(0, int((span.begin - line.begin) / width))
        for cell in range(first, min(_LINE - 1, int((span.end - line.begin) / width)) + 1):
            begin = line.begin + cell * width
            covered = min(span.end, begin + width) - max(span.begin, begin)
            if covered >= shares[cell]:
                letters[cell], shares[cell] = letter, covered
    return "".join(letters)


def _letter(stage: str) -> str:
    return {"submit": "s", "generate": "g", "reward": "r", "balance": "b", "old_log_probs": "o", "ref_log_probs": "f",
            "values": "v", "advantages": "a", "update_critic": "c", "update_actor": "U"}.get(stage, "?")  # fmt: skip


def _step(report: Report, shown: ShownStep) -> None:
    step, unicode = shown.step, report.out_terminal.unicode
    came_to = f" -> version {step.version}" if step.version is not None else ""
    came_to = f" {failure_text(step.failure)}\n" if step.failure is not None else f"{came_to}, "
    report.text(f"\nstep {step.step}{came_to}{shown.total} responses, told by {its(shown)}{shown.source}")
    if shown.fault:
        report.text(f"its record is not used: {shown.fault}")
    report.text("staleness of tokens: " + (ages_of(shown) or "none"))
    if shown.mean_gap is not None:
        report.text(f"log-prob gap of trainer and rollout: mean {shown.mean_gap:.2e}, largest {shown.max_gap:.2e}")
    rows = [_sample(sample, unicode=unicode) for sample in shown.samples]
    report.table(
        ["prompt", "sample", "reward", "advantage", "tokens", "versions", "segments", "ended", "gap mean", "gap max",
         "gap by token", "prompt text", "response text"],
        rows,
    )  # fmt: skip
    if len(shown.samples) < shown.total:
        report.text(f"{len(shown.samples)} of {shown.total} responses; --samples {shown.total} shows all")


def its(shown: ShownStep) -> str:
    """Return what to say before the source of a step."""
    return "" if shown.source == "nothing" else "its "


def ages_of(shown: ShownStep) -> str:
    """Return how many tokens are how many versions old."""
    total = sum(shown.ages.values())
    return ", ".join(f"{age}: {count} ({count / total:.0%})" for age, count in sorted(shown.ages.items()))


def _sample(sample: Sample, *, unicode: bool) -> Sequence[object]:
    gaps = [abs(gap) if gap is not None else float("nan") for gap in sample.gaps]
    return [
        sample.ordinal,
        sample.sample,
        sample.reward,
        sample.advantage,
        sample.tokens,
        " ".join(map(str, sample.versions)),
        segments_of(sample),
        "cut" if sample.cut else sample.reason or None,
        f"{sample.gap_mean:.1e}" if sample.gap_mean is not None else None,
        f"{sample.gap_max:.1e}" if sample.gap_max is not None else None,
        format_sparkline(gaps[:_GAPS], width=_GAPS, unicode=unicode) or None,
        shortened(sample.prompt),
        shortened(sample.response),
    ]


def segments_of(sample: Sample) -> str:
    """Return the segments as ``tokens@version/replica``, observations as ``tokens@task``."""
    return " + ".join(
        f"{p.tokens}@task" if p.observation else f"{p.tokens}@{p.version}/{p.replica}" for p in sample.pieces
    )


def shortened(text: str | None, most: int = _TEXT) -> str | None:
    """Return text on one line, its middle left out where it is long; None for none. Control characters are named."""
    if text is None:
        return None
    line = "".join(
        c if c.isprintable() else f"\\x{ord(c):02x}" if c not in "\n\t" else "\\" + "nt"[c == "\t"] for c in text
    )
    half = (most - 3) // 2
    return line if len(line) <= most else f"{line[:half]}...{line[-half:]}"


def show_difference(report: Report, this: History, other: History, found: RunDifference) -> None:
    """Print keys that differ, then where the runs part."""
    report.text(f"# this: {this.path}\n# other: {other.path}")
    if found.config:
        report.table(["key", "this", "other"], [[d.key, str(d.this), str(d.other)] for d in found.config])
    else:
        report.text("configurations: equal")
    if found.environment:
        report.table(["machine", "this", "other"], [[d.key, str(d.this), str(d.other)] for d in found.environment])
    for name, steps in found.resumed.items():
        if steps:
            report.text(f"{name} was resumed at step {', '.join(map(str, steps))}")
    equal = found.equal_steps
    if equal:
        report.text(f"equal: steps {equal[0]} to {equal[-1]}")
    if found.parting is not None:
        report.text(f"the runs part after step {found.parting.step - 1}, in {parting_text(found.parting)}")
    for name, steps in found.only.items():
        if steps:
            report.text(f"only {name} has steps {steps[0]} to {steps[-1]}")
    report.text(f"compared: {', '.join(found.compared)}")
    if found.equal:
        report.text("the runs are equal")


def parting_text(parting: Parting) -> str:
    """Return where two runs part, in words."""
    sizes = f", by {parting.max_abs:.3g}" if parting.max_abs is not None else ""
    values = f": {_brief(parting.this)} here, {_brief(parting.other)} there" if parting.this != parting.other else ""
    where = f" ({parting.where})" if parting.where else ""
    return f"step {parting.step}, stage {parting.stage}: {parting.tensor}{where} differs{sizes}{values}"


def _brief(value: object) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."
