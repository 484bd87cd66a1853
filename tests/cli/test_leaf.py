"""What happens around a command: exit codes, messages, streams, signals."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from rlctl.cli.leaf import build
from rlctl.cli.root import COMMANDS, main

# A command of our own: run in this process, or by the real program where streams and signals count.
PROBE = '''
import logging, sys, time, types
import rlctl.cli.root
from rlctl.errors import *
from rlctl.report import Report

def main(report: Report, what: str, path: str = "") -> None:
    """Fail in the way that was asked for."""
    if what == "slow":
        print("ready", flush=True)
        time.sleep(60)
    if what == "done":
        report.line("status")
        report.text("data")
        report.document({"x": 1})
        report.line("more status")
        return
    if what == "log":
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger("rlctl.x").log(level, "ours %d", level)
            logging.getLogger("theirs").log(level, "theirs %d", level)
        report.document({})
        return
    if what == "file":
        open(path).read()
    if what == "after":
        report.document({"x": 1})
        raise CheckError("too slow")
    raise {
        "usage": UsageError("bad key", where="a.yaml:3", fix="mend it"),
        "findings": FindingsError("config", [Finding("one"), Finding("two")]),
        "absent": UnavailableError("no GPU"),
        "check": CheckError("does not fit"),
        "requeue": PreemptedError("stopped by SIGTERM"),
        "failed": RlctlError("failed"),
        "bug": ZeroDivisionError("division by zero"),
        "exit": SystemExit(0),
        "lost": BrokenPipeError(32, "Broken pipe"),
    }[what]

module = types.ModuleType("rlctl.commands.probe")
module.main, module.EXAMPLES = main, {"rlctl probe usage": "see an error"}
'''
START = """
rlctl.cli.root.COMMANDS["probe"] = "Fail in the way that was asked for."
sys.modules[module.__name__] = module
sys.exit(rlctl.cli.root.main(["probe", *sys.argv[1:]]))
"""
PROBE_COMMAND = [sys.executable, "-c", PROBE + START]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Return a function that runs the probe in this process, as ``rlctl probe WORDS``."""
    names: dict[str, Any] = {}
    exec(PROBE, names)  # noqa: S102 - the same source as the process runs
    monkeypatch.setitem(COMMANDS, "probe", "Fail in the way that was asked for.")
    monkeypatch.setitem(sys.modules, "rlctl.commands.probe", names["module"])
    for variable in ("RLCTL_DEBUG", "RLCTL_LOG", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)

    def call(*words: str, **environment: str) -> Done:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            code = main(["probe", *words])
        return Done(code, *capfd.readouterr())

    return call


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("usage", 2, "error: a.yaml:3: bad key\n  mend it\n"),
        ("findings", 2, "error: config: 2 faults\n  one\n  two\n"),
        ("absent", 3, "error: no GPU\n"),
        ("check", 4, "error: does not fit\n"),
        ("requeue", 75, "error: stopped by SIGTERM\n"),
        ("failed", 1, "error: failed\n"),
        ("bug", 1, "internal error: ZeroDivisionError: division by zero\n  run the command again with --debug"),
        ("exit", 1, "internal error: SystemExit: 0\n"),
        ("lost", 1, "internal error: BrokenPipeError: [Errno 32] Broken pipe\n"),
    ],
)
def test_every_error_has_its_code_and_one_message(
    probe: Callable[..., Done], what: str, code: int, message: str
) -> None:
    done = probe(what, "--json")
    assert done.returncode == code
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout)
    assert (document["schema"], document["exit_code"]) == ("rlctl.error/1", code)


def test_tracebacks_on_request_only(probe: Callable[..., Done]) -> None:
    for words, environment in ((["--debug"], {}), ([], {"RLCTL_DEBUG": "1"})):
        done = probe("usage", *words, **environment)
        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert done.stderr.endswith("error: a.yaml:3: bad key\n  mend it\n")
    assert "Traceback" not in probe("bug", RLCTL_DEBUG="0").stderr


def test_an_odd_switch_in_the_environment_is_named(probe: Callable[..., Done]) -> None:
    done = probe("check", RLCTL_DEBUG="maybe")
    assert done.returncode == 2
    assert done.stderr == "error: RLCTL_DEBUG: 'maybe' is no switch; write true or false (also 1/0, yes/no, on/off)\n"


@pytest.mark.parametrize("words", [("file", "--path", ""), ("file", "--path="), ("",)])
def test_empty_arguments_are_refused(probe: Callable[..., Done], words: tuple[str, ...]) -> None:
    done = probe(*words, "--json")
    assert done.returncode == 2
    where = "--path" if "file" in words else "rlctl probe"
    assert done.stderr == f"error: {where}: an empty argument\n  give a value, or leave it out\n"
    assert json.loads(done.stdout)["exit_code"] == 2


def test_files_that_cannot_be_read_are_no_bug_of_ours(probe: Callable[..., Done]) -> None:
    done = probe("file", "--path", "/no/such/file")
    assert (done.returncode, done.stderr) == (1, "error: /no/such/file: No such file or directory\n")


def test_a_check_that_fails_after_the_result_keeps_the_one_document(probe: Callable[..., Done]) -> None:
    done = probe("after", "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["schema"] == "rlctl.probe/1"
    assert done.stderr == "error: too slow\n"


def test_usage_errors_of_the_parser_have_a_document_too(probe: Callable[..., Done]) -> None:
    done = probe("--json")
    assert done.returncode == 2
    assert done.stderr == "error: missing argument 'what'\n  see rlctl probe --help\n"
    assert json.loads(done.stdout)["error"]["message"] == "missing argument 'what'"


def test_color_is_for_the_status_only_where_wanted(probe: Callable[..., Done]) -> None:
    assert probe("check", "--color", "always").stderr == "\x1b[31;1merror:\x1b[0m does not fit\n"
    assert probe("check", FORCE_COLOR="1").stderr.startswith("\x1b[31;1m")
    assert "\x1b" not in probe("check", FORCE_COLOR="1", NO_COLOR="1").stderr


def test_log_levels(probe: Callable[..., Done]) -> None:
    def seen(*words: str, **environment: str) -> list[str]:
        done = probe("log", *words, **environment)
        return [" ".join(line.split(": ")[-1].split()) for line in done.stderr.splitlines()]

    assert seen() == ["ours 30", "theirs 30"]
    assert seen("-q") == []
    assert seen("-v") == ["ours 20", "ours 30", "theirs 30"]
    assert seen("-vv") == ["ours 10", "ours 20", "theirs 20", "ours 30", "theirs 30"]
    assert seen(RLCTL_LOG="info") == seen("-v")
    assert seen("-q", RLCTL_LOG="debug") == []
    done = probe("log", RLCTL_LOG="loud")
    assert done.returncode == 2
    assert done.stderr == "error: RLCTL_LOG: 'loud' is no log level\n  known: debug, info, warning, error\n"


def test_a_lost_stderr_ends_no_work() -> None:
    assert run(["bash", "-c", f"{shlex.join(PROBE_COMMAND)} done 2>/dev/full; echo $?"]).stdout == "data\n0\n"


def test_a_full_disk_fails_with_one_message() -> None:
    for words in ("done", "done --json"):
        done = run(["bash", "-c", f"{shlex.join(PROBE_COMMAND)} {words} >/dev/full"])
        assert done.returncode == 1
        assert done.stderr == "status\nerror: cannot write the output: No space left on device\n"


def test_a_reader_that_left_is_silent_and_not_a_success() -> None:
    done = run(["bash", "-c", f"(sleep 0.3; {shlex.join(PROBE_COMMAND)} done --json; echo code $? >&2) | true"])
    assert done.stderr == "status\ncode 1\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals(number: signal.Signals, code: int) -> None:
    with subprocess.Popen(
        [*PROBE_COMMAND, "slow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"  # a print of the command itself stays off stdout
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == ""
    assert err == ("error: interrupted\n" if number == signal.SIGINT else "")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_states_what_the_root_says_and_its_examples_parse(name: str) -> None:
    command = build(name)
    assert command.help is not None
    assert command.help.splitlines()[0] == COMMANDS[name]
    assert command.examples
    for example in command.examples:
        program, first, *words = shlex.split(example.partition(" > ")[0])
        assert (program, first) == ("rlctl", name)
        if "--help" not in words:
            command.make_context(f"rlctl {name}", words)
    shared = {"--json", "--debug", "--verbose", "--quiet", "--color", "--help"}
    context = command.make_context(f"rlctl {name}", [], resilient_parsing=True)
    assert shared <= {option for param in command.get_params(context) for option in param.opts}


def test_help_of_a_command_starts_with_three_lines(capfd: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        text = capfd.readouterr().out
        lines = text.splitlines()
        assert lines[0] == COMMANDS[name]
        assert lines[1].startswith(f"Example: rlctl {name}")
        assert lines[2] == f"Docs: docs/cli.md#rlctl-{name}"
        assert "\x1b" not in text


def test_only_the_chosen_command_is_imported() -> None:
    script = (
        "import sys; from rlctl.cli import main; main(['topology', '--help']);"
        "print([m for m in sys.modules if m.startswith('rlctl.commands.')],"
        "[m for m in ('torch', 'ray', 'vllm', 'transformers', 'rich', 'omegaconf', 'commands') if m in sys.modules])"
    )
    done = run([sys.executable, "-c", script])
    assert done.stdout.splitlines()[-1] == "['rlctl.commands.topology'] []"
