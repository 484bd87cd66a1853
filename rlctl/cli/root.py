"""The root of the command line: its help, its version, and the way to one subcommand.

Nothing here imports more than the standard library needs at start: the help of six commands must cost a login node
nothing, and the command that was asked for is the only one that is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlctl.cli.streams import finish, open_missing_descriptors, undelivered

# Name -> what the command does; the first line of the command's own docstring is the same sentence.
COMMANDS = {
    "train": "Train a language model by reinforcement learning.",
    "sync-bench": "Measure how fast fresh weights reach the rollout engines.",
    "topology": "Show the devices, links and network cards a run would use.",
    "memory-profile": "Show where the memory of a run goes, phase by phase.",
    "replay": "Live recorded steps of a run again and compare them.",
    "convert-keys": "Convert the names and layouts of a model's weights.",
}

# Options of every command, accepted before its name too. The value says whether a word follows.
SHARED_OPTIONS = {
    "--json": False,
    "--debug": False,
    "--verbose": False,
    "-v": False,
    "-vv": False,
    "--quiet": False,
    "-q": False,
    "--color": True,
}

_HEAD = """\
Train, sync, plan and replay LLM reinforcement learning runs.
Example: rlctl train --profile cpu-quickstart
Docs: README.md and docs/cli.md

Usage: rlctl [OPTIONS] COMMAND [ARGS]...
"""

_OPTIONS = {
    "--version": "Print the version and exit.",
    "-h, --help": "Print this text and exit.",
}

_TAIL = """\
Every command also takes --json, --debug, -v, -q, --color and --help.
Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 hardware or package
absent, 4 a check did not hold, 75 stopped with a checkpoint saved (requeue),
130 interrupted.
"""


def help_text() -> str:
    """Return the text of ``rlctl --help``."""
    width = max(map(len, (*COMMANDS, *_OPTIONS)))
    commands = "".join(f"  {name:<{width}}  {summary}\n" for name, summary in COMMANDS.items())
    options = "".join(f"  {name:<{width}}  {meaning}\n" for name, meaning in _OPTIONS.items())
    return f"{_HEAD}\nCommands:\n{commands}\nOptions:\n{options}\n{_TAIL}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        argv: the words after ``rlctl``; those of this process when None.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    open_missing_descriptors()
    try:
        code = _dispatch(words)
    except KeyboardInterrupt:
        _say("interrupted")
        code = 130
    except OSError as error:
        code = undelivered(error)
    return finish(code)


def _dispatch(words: list[str]) -> int:
    shared: list[str] = []
    while words and (step := _shared(words)):
        shared += words[:step]
        del words[:step]
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(help_text())
        return 0
    name, rest = words[0], words[1:]
    if name == "--version":
        from rlctl import __version__

        sys.stdout.write(f"rlctl {__version__}\n")
        return 0
    if name not in COMMANDS:
        return _unknown(name)
    from rlctl.cli.leaf import run

    return run(name, [*shared, *rest])


def _shared(words: list[str]) -> int:
    """Return how many of the first words are an option that every command takes."""
    option, equals, _ = words[0].partition("=")
    if option not in SHARED_OPTIONS:
        return 0
    return 2 if SHARED_OPTIONS[option] and not equals and len(words) > 1 else 1


def _unknown(name: str) -> int:
    from rlctl.errors import EXIT_USAGE
    from rlctl.registry import suggest

    option = name.startswith("-")
    near = suggest(name, [*SHARED_OPTIONS, "--help", "--version"] if option else COMMANDS)
    hint = f"did you mean {near}? " if near else ""
    _say(f"error: no such {'option' if option else 'command'}: {name}\n  {hint}see rlctl --help")
    return EXIT_USAGE


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
