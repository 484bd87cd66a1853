"""The one output object of a command."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rlctl.errors import RlctlError
from rlctl.report.documents import command_document, error_document
from rlctl.report.panel import Panel
from rlctl.report.progress import LiveProgress, PlainProgress, Progress, SilentProgress
from rlctl.report.tables import format_table, harmless
from rlctl.report.terminal import ColorChoice, Terminal


class ReaderGoneError(Exception):
    """Whoever read stdout left before the end (``| head -1``); there is nobody to tell."""


class Report:
    """Data on ``out`` (stdout), everything else on ``err`` (stderr).

    A command states its result twice, for people (:meth:`text`, :meth:`table`) and for scripts (:meth:`document`),
    and the report prints the one that was asked for.

    Args:
        command: name of the subcommand, as typed.
        json: print the document and nothing else on ``out``.
        verbosity: 0 as usual; -1 errors and warnings only; 1 and more for details.
        color: what ``--color`` says.
        out, err: the streams.
    """

    def __init__(
        self,
        command: str,
        *,
        json: bool = False,
        verbosity: int = 0,
        color: ColorChoice = "auto",
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self.command = command
        self.json = json
        self.verbosity = verbosity
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self.out_terminal = Terminal.of(self._out, color)
        self.err_terminal = Terminal.of(self._err, color)
        self.documented = False
        self.above: Callable[[str], None] | None = None
        self._err_gone = False
        self._out_failed = False

    # Status, for people, on stderr.

    def line(self, text: str = "") -> None:
        """Say how things stand. Silent under ``--quiet``."""
        if self.verbosity >= 0:
            self._status(text)

    def detail(self, text: str) -> None:
        """Say what only ``--verbose`` wants to know."""
        if self.verbosity >= 1:
            self._status(text)

    def warn(self, text: str) -> None:
        """Say what may go wrong, also under ``--quiet``."""
        self._status(f"{self.err_terminal.paint('warning:', 'yellow', 'bold')} {text}")

    def error(self, error: BaseException, exit_code: int, *, internal: bool = False) -> None:
        """Say why the command failed; with ``--json`` and no document so far, as a document too."""
        head = "internal error:" if internal else "error:"
        self._status(f"{self.err_terminal.paint(head, 'red', 'bold')} {_described(error, internal=internal)}")
        if self.json and not self.documented and not self._out_failed:
            self.documented = True
            try:
                self._data(error_document(self.command, error, exit_code))
            except RlctlError as failed:
                self._status(f"error: {failed}")
            except ReaderGoneError:
                pass

    def progress(self, label: str, total: float | None = None, *, unit: str = "") -> Progress:
        """Return the progress of one long piece of work, to be used in a ``with`` statement.

        Args:
            label: what is under way.
            total: where it ends, in ``unit``; None when nobody knows.
            unit: what is counted; "bytes" is shown as sizes.
        """
        if self.verbosity < 0:
            return SilentProgress()
        if self.moving:
            return LiveProgress(self.panel(), label, total, unit)
        return PlainProgress(self._status, label, total, unit)

    @property
    def moving(self) -> bool:
        """Whether stderr shows panels that redraw themselves."""
        return self.err_terminal.moving and self.verbosity >= 0

    def panel(self) -> Panel:
        """Return a picture that redraws itself; to be asked for only where :attr:`moving` holds."""
        assert self.moving
        return Panel(self, self._err, self.err_terminal)

    def record(self, text: str) -> None:
        """Print one log record on stderr."""
        self._status(text)

    # Data, on stdout.

    def text(self, text: str) -> None:
        """Print data as it is, a newline added where it has none. Nothing under ``--json``."""
        if not self.json:
            self._data(harmless(text if text.endswith("\n") else f"{text}\n"))

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print an aligned table, never cut (:func:`rlctl.report.tables.format_table`). Nothing under ``--json``."""
        if not self.json:
            self._data(harmless(format_table(headers, rows)))

    def document(self, fields: Mapping[str, Any]) -> None:
        """Print the result as the command's one JSON document. Nothing without ``--json``."""
        if not self.json:
            return
        assert not self.documented, f"{self.command} printed two documents"
        self._data(command_document(self.command, fields))
        self.documented = True

    def _data(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except OSError as error:
            self._out_failed = True
            if isinstance(error, BrokenPipeError):
                raise ReaderGoneError from error
            raise RlctlError(f"cannot write the output: {error.strerror}") from error

    def _status(self, text: str) -> None:
        # A run of days must not end because the reader of its messages went away.
        if self._err_gone:
            return
        text = harmless(text)
        try:
            if self.above is not None:
                self.above(text)
                return
            self._err.write(f"{text}\n")
            self._err.flush()
        except OSError:
            self._err_gone = True


def _described(error: BaseException, *, internal: bool) -> str:
    if internal:
        return f"{type(error).__name__}: {error}\n  run the command again with --debug for the traceback"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}"
    return str(error)


@contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Keep descriptor 1 for the report: while the block runs, whatever else writes to stdout reaches stderr.

    Yields the stream of the real stdout. Works on descriptors, so that C libraries and child processes are caught.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    line_buffered = isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.line_buffering
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    out = os.fdopen(kept, "w", encoding=sys.stdout.encoding, errors="replace")
    try:
        yield out
    finally:
        sys.stdout.flush()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=line_buffered)
        os.dup2(out.fileno(), 1)
        # The report flushes each write and raises what fails there; here the same bytes would only fail again.
        with suppress(OSError):
            out.close()
