"""The root of the command line, as a process."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl import __version__
from rlctl.cli.root import COMMANDS, help_text, main

HEAVY = ["torch", "ray", "vllm", "rich", "pydantic", "omegaconf", "transformers", "numpy", "typer", "rlctl.commands"]


def rlctl(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR", "FORCE_COLOR")} | environment
    return subprocess.run(
        [sys.executable, "-m", "rlctl", *words], capture_output=True, text=True, env=env, timeout=60, check=False
    )


def test_no_arguments_and_help_print_the_same_help() -> None:
    bare, asked = rlctl(), rlctl("--help")
    assert bare.returncode == asked.returncode == 0
    assert bare.stdout == asked.stdout == help_text()
    assert bare.stderr == ""
    first = help_text().splitlines()
    assert first[1].startswith("Example: rlctl ")
    assert first[2].startswith("Docs: ")
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", help_text(), re.MULTILINE)
    assert max(map(len, first)) <= 80


def test_help_and_version_import_nothing_heavy() -> None:
    for words in (["--help"], ["--version"], ["-h"], []):
        code = (
            "import sys; from rlctl.cli import main; code = main(sys.argv[1:]);"
            f"print('LOADED', [m for m in {HEAVY!r} if m in sys.modules]); sys.exit(code)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.splitlines()[-1] == "LOADED []", words


def test_help_costs_at_most_three_bare_argparse_helps(tmp_path: Path) -> None:
    bare = tmp_path / "bare.py"
    lines = ["import argparse", "p = argparse.ArgumentParser('bare')", "s = p.add_subparsers()"]
    lines += [f"s.add_parser({name!r}, help={summary!r})" for name, summary in COMMANDS.items()]
    bare.write_text("\n".join([*lines, "p.parse_args()"]))

    def cpu(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command, "--help"], stdout=subprocess.DEVNULL, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    rounds = [(cpu("-m", "rlctl"), cpu(str(bare))) for _ in range(7)]
    ours, theirs = min(r[0] for r in rounds), min(r[1] for r in rounds)
    assert ours <= 3 * theirs, f"rlctl --help {ours * 1000:.0f} ms, bare argparse {theirs * 1000:.0f} ms of CPU"


def test_version_is_one_line() -> None:
    done = rlctl("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"rlctl {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "error: no such command: trian\n  did you mean train? see rlctl --help\n"),
        (["memory_profile"], "error: no such command: memory_profile\n  did you mean memory-profile? see"),
        (["--versoin"], "error: no such option: --versoin\n  did you mean --version? see rlctl --help\n"),
        (["xyzzy"], "error: no such command: xyzzy\n  see rlctl --help\n"),
        (
            ["replay", "--jsno"],
            "error: no such option: --jsno\n  did you mean --json or --show? see rlctl replay --help\n",
        ),
        (["replay", "--color", "blue"], "error: invalid value for '--color': 'blue' is not one of 'auto'"),
    ],
)
def test_typos_get_a_suggestion_and_exit_2(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(message)


def test_shared_options_stand_before_or_after_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    run = "/no/such/run"
    for words in (
        ["--json", "--color", "never", "-v", "replay", run],
        ["replay", "--json", run, "--color=never", "-v"],
    ):
        assert main(words) == 2
        document = json.loads(capfd.readouterr().out)
        assert document["schema"] == "rlctl.error/1"
        assert document["command"] == "replay"
        assert document["exit_code"] == 2


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    for command in ("--help", "topology --help", "replay --json /no/such/run"):
        shell = f"set -o pipefail; {sys.executable} -m rlctl {command} | head -1"
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
        assert "Traceback" not in done.stderr
        assert "Broken" not in done.stderr
    shell = f"(sleep 0.5; {sys.executable} -m rlctl --help; echo code $? >&2) | true"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "code 1\n"


@pytest.mark.parametrize("command", ["--help", "topology --help", "topology --json", "--version"])
@pytest.mark.parametrize("sink", [">&-", ">/dev/full"])
def test_output_that_cannot_be_written_is_an_error(command: str, sink: str) -> None:
    shell = f"{sys.executable} -m rlctl {command} {sink}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 3)
    assert "Traceback" not in done.stderr
    assert "cannot write the output" in done.stderr
