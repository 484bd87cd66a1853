"""Errors that a user is meant to read: what is wrong, where, what to do next, and the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_CHECK = 4
EXIT_REQUEUE = 75
EXIT_INTERRUPTED = 130


class RlctlError(Exception):
    """Base of every error that rlctl raises on purpose.

    Args:
        message: what is wrong, in one sentence.
        where: the place: ``file:line``, an argument, a path.
        fix: what to do next.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        return f"{head}\n  {self.fix}" if self.fix else head

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default reduction, and errors cross process boundaries.
        return (_rebuild, (type(self), self.__dict__.copy(), self.args))


def _rebuild(cls: type[RlctlError], state: dict[str, object], args: tuple[object, ...]) -> RlctlError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(RlctlError):
    """A wrong argument or a wrong configuration (exit 2)."""

    exit_code = EXIT_USAGE


class UnavailableError(RlctlError):
    """Hardware or a package that the request needs is absent here (exit 3)."""

    exit_code = EXIT_UNAVAILABLE


class CheckError(RlctlError):
    """Something ran to its end, but a check on it did not hold (exit 4)."""

    exit_code = EXIT_CHECK


class PreemptedError(RlctlError):
    """Stopped by a signal with a checkpoint saved; the job may be queued again (exit 75)."""

    exit_code = EXIT_REQUEUE


class StoppedError(RlctlError):
    """Interrupted from the keyboard (exit 130)."""

    exit_code = EXIT_INTERRUPTED


@dataclass(frozen=True)
class Finding:
    """One fault in an input: where it stands, what is wrong, what to do."""

    message: str
    where: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        return f"{head}; {self.fix}" if self.fix else head


class FindingsError(UsageError):
    """Every fault of an input at once, so that a user mends them in one pass; of very many, the first ``limit``."""

    def __init__(self, title: str, findings: Sequence[Finding], *, limit: int | None = None) -> None:
        more = f", the first {limit}" if limit is not None and len(findings) > limit else ""
        super().__init__(f"{title}: {len(findings)} fault{'s' if len(findings) != 1 else ''}{more}")
        self.findings = list(findings[:limit])

    def __str__(self) -> str:
        return "\n".join([f"{self.message}", *(f"  {f}" for f in self.findings)])
