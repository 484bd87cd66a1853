"""What came of a replay, for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import PurePath
from typing import TYPE_CHECKING

from rlctl.report.output import Report

if TYPE_CHECKING:
    from rlctl.replay.findings import Finding

_WORDS = {"exact": "exact", "differs": "DIFFERS", "unavailable": "-"}
_FIGURES = ("reward", "loss", "grad_norm", "ppo_kl", "clip_fraction", "lr")


def show_findings(report: Report, findings: Sequence[Finding]) -> None:
    """Print steps by levels, then what differs, then why levels could not run."""
    levels = sorted({finding.level for finding in findings})
    rows: list[tuple[list[int], list[str | None]]] = []
    for step, found in groupby(findings, key=lambda finding: finding.step):
        said = {finding.level: _WORDS[finding.status] for finding in found}
        words = [said.get(level) for level in levels]
        if rows and rows[-1][0][-1] == step - 1 and rows[-1][1] == words and step > 1:
            rows[-1][0].append(step)
        else:
            rows.append(([step], words))
    report.table(["step", *levels], [[_range(steps), *words] for steps, words in rows])
    for finding in findings:
        if finding.status == "differs":
            report.text(finding_text(finding))
    reasons: dict[tuple[str, str, str], list[int]] = {}
    for finding in findings:
        if finding.status != "differs" and finding.reason:
            reasons.setdefault((finding.level, finding.status, finding.reason), []).append(finding.step)
    for (level, status, reason), steps in reasons.items():
        report.text(f"{level} {status} for {_steps(steps)}: {reason}")
    counts = {status: sum(finding.status == status for finding in findings) for status in _WORDS}
    report.text(", ".join(f"{count} {status}" for status, count in counts.items() if count))


def finding_text(finding: Finding) -> str:
    """Return what differs, in one line."""
    difference = finding.first_difference
    where = "the run" if finding.step == 0 else f"step {finding.step}"
    parts = [f"{where} differs at {finding.level}"]
    if difference is not None:
        gap = f", by at most {difference.max_abs:.3g}" if difference.max_abs is not None else ""
        parts.append(f"stage {difference.stage}, {difference.tensor}{gap}")
    if finding.reason:
        # Of a file the reason begins with its name, which its path has said.
        named = "" if difference is None else f"{PurePath(difference.tensor).name}: "
        parts.append(finding.reason.removeprefix(named))
    return ": ".join(parts)


def show_what_if(report: Report, findings: Sequence[Finding], recorded: dict[int, dict[str, float]]) -> None:
    """Print what each step came to beside what was recorded of it."""
    rows: list[list[object]] = []
    for finding in findings:
        told = recorded.get(finding.step, {})
        rows += [
            [finding.step, name, f"{told[name]:.9g}" if name in told else None, f"{finding.metrics[name]:.9g}"]
            for name in _FIGURES
            if name in finding.metrics
        ]
        rows.append([finding.step, "parameters", None, finding.params_digest[:16] or None])
    report.table(["step", "figure", "recorded", "what if"], rows)
    for finding in findings:
        first = finding.first_difference
        where = f"; first difference: stage {first.stage}, {first.tensor}" if first is not None else ""
        report.text(f"step {finding.step}, {finding.status}: {finding.reason}{where}")


def _steps(steps: Sequence[int]) -> str:
    ordered = sorted(set(steps))
    if len(ordered) > 1 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"steps {ordered[0]} to {ordered[-1]}"
    return f"step{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))}"


def _range(steps: Sequence[int]) -> str:
    if steps[0] == 0:
        return "run"
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
