"""What ``rlctl topology --check`` shows to people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlctl.hardware.rules.outcome import Outcome, Status
from rlctl.report.output import Report

_STYLES = {"ok": ("green",), "warn": ("yellow",), "fail": ("red", "bold"), "skipped": ("dim",)}
_ORDER: tuple[Status, ...] = ("fail", "warn", "ok", "skipped")


def printable(text: str) -> str:
    """Return a text whose control characters are written out: values of variables may hold any."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_checks(report: Report, outcomes: Sequence[Outcome]) -> None:
    """Print every rule's outcome, the worst first, with what to do."""
    width = max((len(outcome.rule) for outcome in outcomes), default=0)
    report.text("# checks")
    for outcome in sorted(outcomes, key=lambda outcome: _ORDER.index(outcome.status)):
        status = report.out_terminal.paint(f"{outcome.status:<7}", *_STYLES[outcome.status])
        report.text(f"{status}  {outcome.rule:<{width}}  {printable(outcome.message)}")
        if outcome.fix is not None:
            report.text(f"{'':<7}  {'':<{width}}  -> {printable(outcome.fix)}")
    counts = Counter(outcome.status for outcome in outcomes)
    report.text(", ".join(f"{counts[status]} {status}" for status in _ORDER))
