"""``rlctl replay``."""

from __future__ import annotations

from rlctl.errors import UnavailableError
from rlctl.report import Report

EXAMPLES = {"rlctl replay --help": "what it will take"}


def main(report: Report) -> None:
    """Live recorded steps of a run again and compare them."""
    raise UnavailableError(f"{report.command} is not built yet in this version", fix="see CHANGELOG.md for what is")
