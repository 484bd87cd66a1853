"""``rlctl convert-keys``."""

from __future__ import annotations

from rlctl.errors import UnavailableError
from rlctl.report import Report

EXAMPLES = {"rlctl convert-keys --help": "what it will take"}


def main(report: Report) -> None:
    """Convert the names and layouts of a model's weights."""
    raise UnavailableError(f"{report.command} is not built yet in this version", fix="see CHANGELOG.md for what is")
