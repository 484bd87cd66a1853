"""What a rule found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rule.

    Attributes:
        rule: its name.
        status: "fail" is what a run would break on or silently do otherwise than asked; "warn" costs speed or may be
            meant; "skipped" could not be looked at, and the message says why.
        message: what was found.
        fix: what to do, for "warn" and "fail".
    """

    rule: str
    status: Status
    message: str
    fix: str | None = None


def ok(rule: str, message: str) -> Outcome:
    """Return an outcome that is as it should be."""
    return Outcome(rule, "ok", message)


def warn(rule: str, message: str, fix: str) -> Outcome:
    """Return an outcome that costs something."""
    return Outcome(rule, "warn", message, fix)


def fail(rule: str, message: str, fix: str) -> Outcome:
    """Return an outcome that breaks something."""
    return Outcome(rule, "fail", message, fix)


def skipped(rule: str, why: str) -> Outcome:
    """Return the outcome of a rule that had nothing to look at."""
    return Outcome(rule, "skipped", why)
