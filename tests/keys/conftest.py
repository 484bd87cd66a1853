"""What tests of the ``convert-keys`` command share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from rlctl.cli import main


@dataclass
class Done:
    """What one run of the command printed."""

    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.stdout)


class Rlctl(Protocol):
    def __call__(self, *words: str | Path, code: int = 0) -> Done: ...


@pytest.fixture
def rlctl(capfd: pytest.CaptureFixture[str]) -> Rlctl:
    """Run ``rlctl convert-keys`` in this process and check its exit code and that no traceback was shown."""

    def run(*words: str | Path, code: int = 0) -> Done:
        capfd.readouterr()
        found = main(["convert-keys", *map(str, words)])
        done = Done(*capfd.readouterr())
        assert found == code, (found, done.stdout[-2000:], done.stderr[-2000:])
        assert "Traceback" not in done.stderr
        return done

    return run
