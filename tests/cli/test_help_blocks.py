"""The help inside the documents is what the program prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.cli.help_blocks import DOCUMENTS, blocks, help_of, renewed
from rlctl.cli.root import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_blocks_are_fresh(name: str) -> None:
    text = (ROOT / name).read_text()
    assert renewed(text) == text, f"{name} is stale; run `make docs`"


def test_the_reference_has_every_command_under_the_heading_that_its_help_names() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    assert blocks(text) == ["", *COMMANDS]
    for name in COMMANDS:
        assert f"\n## rlctl {name}\n" in text
        assert f"docs/cli.md#rlctl-{name}" in help_of(name)
    assert {"", "train"} <= set(blocks((ROOT / "README.md").read_text()))


def test_a_terminal_of_80_columns_shows_the_same() -> None:
    for name in ("", "train"):
        words = [sys.executable, "-m", "rlctl", *([name] if name else []), "--help"]
        env = {**os.environ, "COLUMNS": "80"}
        done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60, check=True)
        assert done.stdout == help_of(name)
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_stale_block_is_renewed_and_nothing_else() -> None:
    text = "a\n<!-- help: rlctl replay -->\nstale text\n<!-- end of help -->\nb\n"
    fresh = renewed(text)
    assert "stale text" not in fresh
    assert fresh.startswith("a\n<!-- help: rlctl replay -->\n```text\nLive recorded steps")
    assert "```\n<!-- end of help -->\nb\n" in fresh
    assert renewed(fresh) == fresh
