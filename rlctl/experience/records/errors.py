"""What can be wrong with a record."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import EXIT_UNAVAILABLE, CheckError

_FIX = "rlctl replay RUN --level R0 names everything in a run folder that is not what was recorded"


class RecordError(CheckError):
    """A file of a record that is not what was written, or was never a record's.

    Attributes:
        file: which.
        what: is wrong with it.
    """

    def __init__(self, file: Path, what: str, *, fix: str | None = None) -> None:
        super().__init__(what, where=str(file), fix=fix or _FIX)
        self.file = file
        self.what = what


class AbsentError(RecordError):
    """A record or a checkpoint is not there, as one that was let go since the folder was looked at (exit 3)."""

    exit_code = EXIT_UNAVAILABLE

    def __init__(self, file: Path, what: str) -> None:
        super().__init__(file, what, fix="a run under way lets go of what leaves its window; rlctl replay RUN --list")
