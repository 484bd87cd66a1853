"""The three standard descriptors at the start and the end of the process."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_NAMES = {1: "stdout", 2: "stderr"}


def open_missing_descriptors() -> None:
    """Give a closed standard descriptor (``rlctl >&-``) a placeholder.

    Otherwise the next file that the process opens would get the number 1 or 2, and a stray print of some library
    would land inside it. Reading from the placeholders gives the end of the file; writing to them fails, so that
    output which nobody can receive is an error and not silence. A placeholder for stderr swallows.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is taken, which is this one: lower ones are open by now.
            os.open(os.devnull, mode)
            if name := _NAMES.get(descriptor):
                setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))


def finish(code: int) -> int:
    """Flush what was written and return the exit code: 1 where a success could not be delivered."""
    try:
        sys.stdout.flush()
    except OSError as error:
        failed = undelivered(error)
        code = code or failed
    try:
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)
    return code


def undelivered(error: OSError) -> int:
    """Give stdout up after a failed write, say so, and return the exit code.

    A reader that left early (``| head -1``) is no fault worth a message; a full disk is.
    """
    _silence(sys.stdout)
    if not isinstance(error, BrokenPipeError):
        sys.stderr.write(f"error: cannot write the output: {error.strerror}\n")
    return 1


def _silence(stream: TextIO) -> None:
    # The interpreter flushes once more at its exit, and would fail again.
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, stream.fileno())
    os.close(sink)
