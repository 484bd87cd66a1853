"""``rlctl topology``."""

from __future__ import annotations

from rlctl.errors import UnavailableError
from rlctl.report import Report

EXAMPLES = {"rlctl topology --help": "what it will take"}


def main(report: Report) -> None:
    """Show the devices, links and network cards a run would use."""
    raise UnavailableError(f"{report.command} is not built yet in this version", fix="see CHANGELOG.md for what is")
