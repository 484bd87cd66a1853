"""Completion scripts: fresh, quick, and doing their work in the real shells."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from rlctl.cli.completion import scripts
from rlctl.cli.completion.collect import collect
from rlctl.cli.root import COMMANDS

FOLDER = Path(__file__).parents[2] / "completions"


def test_the_scripts_are_fresh() -> None:
    for name, text in scripts().items():
        assert (FOLDER / name).read_text() == text, f"completions/{name} is stale; run `make completions`"
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(scripts())


def test_everything_is_collected() -> None:
    program = collect()
    assert [command.name for command in program.commands] == list(COMMANDS)
    train = program.commands[0]
    options = {name: option for option in train.options for name in option.names}
    assert {"--profile", "--dry-run", "--resume", "--json", "--help"} <= set(options)
    assert options["--dry-run"].value is None
    assert options["--verbose"].again
    assert options["--color"].value is not None
    assert options["--color"].value.words == ("auto", "always", "never")
    assert options["--profile"].value is not None
    assert "cpu-quickstart" in options["--profile"].value.words
    assert options["--mode"].value is not None
    assert "sync" in options["--mode"].value.words
    assert train.keys
    assert program.keys["sync.verify"] == ("full", "sampled", "off")


def replies(line: str, *, folder: Path, wordbreaks: str = " \t\n\"'@><=;|&(:") -> list[str]:
    """Return what bash would offer for the end of ``line``."""
    words = []
    for word in line.split(" "):
        # Bash hands "a=b" over as three words while "=" is a word break.
        parts = word.partition("=") if "=" in wordbreaks and "=" in word else (word,)
        words += [part for i, part in enumerate(parts) if part or i == 0]
    script = (
        f"source {shlex.quote(str(FOLDER / 'rlctl.bash'))}; COMP_WORDBREAKS={shlex.quote(wordbreaks)};"
        f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; _rlctl;"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, cwd=folder, env={}, timeout=30, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlctl tra", ["train"]),
        ("rlctl sy", ["sync-bench"]),
        ("rlctl --ver", ["--version", "--verbose"]),
        ("rlctl --color ", ["auto", "always", "never"]),
        ("rlctl --color never tr", ["train"]),
        ("rlctl --json tr", ["train"]),
        ("rlctl train --dry", ["--dry-run"]),
        ("rlctl train --profile 16", ["16xH100-separate"]),
        ("rlctl train --profile=16", ["16xH100-separate"]),
        ("rlctl train --json --profile cpu-q", ["cpu-quickstart"]),
        ("rlctl train --profile min", ["mine.yaml"]),
        ("rlctl train --resume ", ["auto", "run"]),
        ("rlctl train --mode sy", ["sync"]),
        ("rlctl train --color=al", ["always"]),
        ("rlctl train --steps ", []),
        ("rlctl train --dry-run=", []),
        ("rlctl train al", ["algorithm."]),
        ("rlctl train sync.v", ["sync.verify="]),
        ("rlctl train sync.verify=", ["full", "sampled", "off"]),
        ("rlctl train --dry-run sync.verify=sam", ["sampled"]),
        ("rlctl train run.steps=", []),
        ("rlctl topology --j", ["--json"]),
        ("rlctl nonsense --j", []),
    ],
)
def test_bash_offers(tmp_path: Path, line: str, expected: list[str]) -> None:
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "run").mkdir()
    assert replies(line, folder=tmp_path) == expected


def test_bash_without_equals_as_a_word_break(tmp_path: Path) -> None:
    for line, expected in (
        ("rlctl train --profile=16", ["--profile=16xH100-separate"]),
        ("rlctl train sync.verify=sam", ["sync.verify=sampled"]),
    ):
        assert replies(line, folder=tmp_path, wordbreaks=" \t\n") == expected


def test_every_option_and_word_is_in_the_bash_script_and_quick(tmp_path: Path) -> None:
    program = collect()
    for command in program.commands:
        names = {name for option in command.options for name in option.names if name.startswith("--")}
        start = time.perf_counter()
        assert set(replies(f"rlctl {command.name} --", folder=tmp_path)) == names
        # With the start of bash itself; starting Python alone would take longer on a login node.
        assert time.perf_counter() - start < 2


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source {folder}/rlctl.bash"),
    "zsh": (["zsh", "-f", "-i"], "fpath=({folder} $fpath); autoload -Uz compinit; compinit -u -D"),
    "fish": (["fish", "--no-config", "-i"], "source {folder}/rlctl.fish"),
}
# What a person types, with a tab at its end, and what rlctl gets when they then press return.
TYPED = {
    "rlctl tra\t": "train",
    "rlctl train --profile 16x\t": "train --profile 16xH100-separate",
    "rlctl train --profile=cpu-q\t": "train --profile=cpu-quickstart",
    "rlctl train sync.verify=sam\t": "train sync.verify=sampled",
    "rlctl train run.dete\t": "train run.deterministic=",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_tab_in_the_real_shell(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command, setup = SHELLS[shell]
    log = tmp_path / "log"
    # A stand-in for the program that tells what it was called with.
    function = f"function rlctl; echo $argv >>{log}; end" if shell == "fish" else f'rlctl() {{ echo "$@" >>{log}; }}'
    with Terminal(command, tmp_path) as terminal:
        terminal.type(f"{setup.format(folder=shlex.quote(str(FOLDER)))}; {function}; touch {log}\n")
        terminal.wait(log.exists)
        for number, (typed, expected) in enumerate(TYPED.items()):
            terminal.type(typed)
            terminal.type("\n")
            terminal.wait(lambda n=number: len(log.read_text().splitlines()) > n)
            assert log.read_text().splitlines()[-1] == expected, terminal.shown


class Terminal:
    """A program on a pseudo-terminal of its own, to type into."""

    def __init__(self, command: list[str], home: Path) -> None:
        self._leader, follower = pty.openpty()
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=follower, stdout=follower, stderr=follower, cwd=home, env=env
        )
        os.close(follower)
        self.shown = b""

    def type(self, text: str) -> None:
        """Type once the program has been silent for a moment, and so is waiting for input."""
        while self._read(0.15):
            pass
        os.write(self._leader, text.encode())

    def wait(self, reached: Callable[[], bool]) -> None:
        """Wait until ``reached`` says so, for 20 seconds at most."""
        deadline = time.monotonic() + 20
        while not reached():
            self._read(0.02)
            assert time.monotonic() < deadline, self.shown

    def _read(self, seconds: float) -> bool:
        if not select.select([self._leader], [], [], seconds)[0]:
            return False
        self.shown += os.read(self._leader, 65536)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._leader)
