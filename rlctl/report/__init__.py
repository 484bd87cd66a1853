"""What a command shows: tables and JSON on stdout; status, progress and errors on stderr."""

from rlctl.report.output import Report

__all__ = ["Report"]
