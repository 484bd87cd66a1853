"""Trackers that other people might write, for the tests' child processes."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from rlctl.trackers.base import RunInfo, Tracker


class Lines(Tracker):
    """Writes what it is told to a file; the last line is the status."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.notice = "writing lines"

    def write(self, value: object) -> None:
        with Path(self.run.folder, "lines").open("a") as file:
            file.write(json.dumps(value) + "\n")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.write([step, dict(figures)])

    def close(self, status: str) -> None:
        self.write(status)


class Slow(Lines):
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        time.sleep(0.02)
        super().log(step, figures)


class FailsToOpen(Lines):
    def __init__(self, run: RunInfo) -> None:
        raise ValueError("no such project")


class Fails(Lines):
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step == 2:
            raise ConnectionError("server gone\nfor good")
        super().log(step, figures)


class Leaves(Lines):
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        raise SystemExit(3)


class Crashes(Lines):
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Hangs(Lines):
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)


class NeverEnds(Lines):
    def close(self, status: str) -> None:
        time.sleep(1000)


class NeedsMore(Lines):
    packages: ClassVar[Mapping[str, str]] = {"no_such_module_here": "no-such-package"}
