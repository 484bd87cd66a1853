"""Compute threads, set up before torch is imported. This module imports nothing heavy."""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Set what must stand before torch loads; what a user has set stays.

    Spinning OpenMP threads on a shared machine cost up to ten times the work itself; passive waiting costs nothing
    measurable when the cores are free. Tokenizers warn when a process that used their threads forks.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def thread_count(configured: int) -> int:
    """Return the threads of this process: the configured number, or the usable cores, at most 2."""
    return configured or min(2, len(os.sched_getaffinity(0)))
