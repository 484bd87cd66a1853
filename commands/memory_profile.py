"""``rlctl memory-profile``."""

from __future__ import annotations

from rlctl.errors import UnavailableError
from rlctl.report import Report

EXAMPLES = {"rlctl memory-profile --help": "what it will take"}


def main(report: Report) -> None:
    """Show where the memory of a run goes, phase by phase."""
    raise UnavailableError(f"{report.command} is not built yet in this version", fix="see CHANGELOG.md for what is")
