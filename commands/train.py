"""``rlctl train``."""

from __future__ import annotations

from rlctl.errors import UnavailableError
from rlctl.report import Report

EXAMPLES = {"rlctl train --help": "what it will take"}


def main(report: Report) -> None:
    """Train a language model by reinforcement learning."""
    raise UnavailableError(f"{report.command} is not built yet in this version", fix="see CHANGELOG.md for what is")
