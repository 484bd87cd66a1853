"""What can be wrong with a record."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import RlctlError


class RecordError(RlctlError):
    """A file of a record that is not what was written, or was never a record's.

    Attributes:
        file: which.
        what: is wrong with it.
    """

    def __init__(self, file: Path, what: str, *, fix: str | None = None) -> None:
        super().__init__(what, where=str(file), fix=fix)
        self.file = file
        self.what = what
