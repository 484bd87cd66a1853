"""Where log records go: stderr, by ``-v``, ``-q`` and ``RLCTL_LOG``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlctl.errors import UsageError
from rlctl.report.output import Report

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_BY_VERBOSITY = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}


class _ReportHandler(logging.Handler):
    """Records as status lines: they stand above a panel, and a stderr that nobody reads ends no run."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report.record(self.format(record))


def log_level(verbosity: int, environment: Mapping[str, str]) -> int:
    """Return the level of rlctl's own records. ``-v`` and ``-q`` win over ``RLCTL_LOG``.

    Raises UsageError when the variable holds no level.
    """
    named = environment.get("RLCTL_LOG", "").lower()
    if named and named not in _LEVELS:
        raise UsageError(f"{named!r} is no log level", where="RLCTL_LOG", fix=f"known: {', '.join(_LEVELS)}")
    if verbosity == 0 and named:
        return _LEVELS[named]
    return _BY_VERBOSITY[max(-1, min(2, verbosity))]


@contextmanager
def logs_to(report: Report) -> Iterator[None]:
    """Send the log records of this process through the report while the block runs: rlctl's own by its verbosity,
    other people's only from warnings on, or from info on under ``-vv``.

    Bars of other libraries are switched off: they fill a log with carriage returns.
    """
    level = log_level(report.verbosity, os.environ)
    handler = _ReportHandler(report)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root, own = logging.getLogger(), logging.getLogger("rlctl")
    before = (root.handlers[:], root.level, own.level)
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.INFO if level == logging.DEBUG else logging.WARNING))
    own.setLevel(level)
    for variable in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(variable, "1")
    try:
        yield
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        own.setLevel(before[2])
