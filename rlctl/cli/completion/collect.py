"""What there is to complete: commands, their options, and the words that may follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from typer.core import TyperArgument, TyperOption

from rlctl.cli.leaf import PlainCommand, build
from rlctl.cli.root import COMMANDS, SHARED_OPTIONS
from rlctl.config.keytable import KeySpec, key_table
from rlctl.config.profiles import profile_names
from rlctl.ops.resolve import OPEN_CHOICES

Paths = Literal["", "files", "folders"]

_PROFILE = "--profile"
_RESUME = "--resume"
# Options that stand for a key take that key's words.
_FLAG_KEYS = {"--mode": "trainer.mode", "--backend": "sync.backend"}
_FOLDER_OPTIONS = ("--run-dir", "--model", _RESUME)
_FILE_OPTIONS = ("--config", "--task", _PROFILE)


@dataclass(frozen=True)
class Value:
    """What may follow an option: words, and files or folders besides."""

    words: tuple[str, ...] = ()
    paths: Paths = ""


@dataclass(frozen=True)
class Option:
    """One option: its names, its meaning, its value (None: a flag), whether it may be given again."""

    names: tuple[str, ...]
    help: str
    value: Value | None
    again: bool


@dataclass(frozen=True)
class Command:
    """One subcommand; ``keys`` tells whether it takes KEY=VALUE words, ``paths`` what its other words are."""

    name: str
    help: str
    options: tuple[Option, ...]
    keys: bool
    paths: Paths


@dataclass(frozen=True)
class Program:
    """Everything: the commands, the root's own options, and every configuration key with the words of its value."""

    commands: tuple[Command, ...]
    root_options: tuple[Option, ...]
    keys: dict[str, tuple[str, ...]]


def collect() -> Program:
    """Look at every command (which imports them all)."""
    commands = tuple(_command(name, build(name)) for name in COMMANDS)
    shared = [o for o in commands[0].options if any(name in SHARED_OPTIONS for name in o.names)]
    own = [
        Option(("--version",), "Print the version and exit.", None, again=False),
        Option(("-h", "--help"), "Print the help and exit.", None, again=False),
    ]
    return Program(commands, (*own, *shared), {key: _key_words(spec) for key, spec in key_table().items()})


def _command(name: str, command: PlainCommand) -> Command:
    context = command.make_context(f"rlctl {name}", [], resilient_parsing=True)
    parameters = command.get_params(context)
    arguments = [p for p in parameters if isinstance(p, TyperArgument)]
    return Command(
        name=name,
        help=COMMANDS[name],
        options=tuple(_options(parameters)),
        keys=any("KEY=VALUE" in (a.metavar or "") for a in arguments),
        paths="files" if any("KEY=VALUE" not in (a.metavar or "") for a in arguments) else "",
    )


def _options(parameters: object) -> Iterator[Option]:
    assert isinstance(parameters, list)
    for parameter in parameters:
        if not isinstance(parameter, TyperOption):
            continue
        # Short before long; typer has the two names of --help in no fixed order.
        names = tuple(sorted((*parameter.opts, *parameter.secondary_opts), key=len))
        value = None if parameter.is_flag or parameter.count else _value(parameter)
        yield Option(names, " ".join((parameter.help or "").split()), value, parameter.multiple or parameter.count)


def _value(parameter: TyperOption) -> Value:
    described = parameter.type_descriptor
    if described.is_choice:
        return Value(tuple(str(choice) for choice in described.choices or ()))
    for name in parameter.opts:
        if name == _PROFILE:
            auto = ("auto",) if "auto" in (parameter.metavar or "").split("|") else ()
            return Value((*auto, *profile_names()), "files")
        if name == _RESUME:
            return Value(("auto",), "folders")
        if name in _FLAG_KEYS:
            return Value(_key_words(key_table()[_FLAG_KEYS[name]]))
        if name in _FOLDER_OPTIONS:
            return Value(paths="folders")
        if name in _FILE_OPTIONS or described.is_path:
            return Value(paths="files")
    return Value()


def _key_words(spec: KeySpec) -> tuple[str, ...]:
    if spec.path in OPEN_CHOICES:
        return tuple(OPEN_CHOICES[spec.path]())
    if spec.kind == "bool":
        return ("true", "false")
    return spec.choices
