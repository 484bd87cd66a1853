"""``rlctl sync-bench``."""

from __future__ import annotations

from rlctl.errors import UnavailableError
from rlctl.report import Report

EXAMPLES = {"rlctl sync-bench --help": "what it will take"}


def main(report: Report) -> None:
    """Measure how fast fresh weights reach the rollout engines."""
    raise UnavailableError(f"{report.command} is not built yet in this version", fix="see CHANGELOG.md for what is")
