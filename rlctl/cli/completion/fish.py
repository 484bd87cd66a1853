"""The script for fish."""

from __future__ import annotations

from rlctl.cli.completion.collect import Command, Option, Program

_HEAD = """\
# Completion of rlctl for fish. Written by `make completions`; starts no Python.
# Use: copy it to ~/.config/fish/completions/rlctl.fish

"""

_PATHS = {"": "-x", "files": "-r -F", "folders": "-x"}


def fish_script(program: Program) -> str:
    """Return the script."""
    names = " ".join(command.name for command in program.commands)
    at_root = f"not __fish_seen_subcommand_from {names}"
    lines = ["complete -c rlctl -f"]
    lines += [_option(option, at_root) for option in program.root_options]
    lines += [f"complete -c rlctl -n {_quote(at_root)} -a {c.name} -d {_quote(c.help)}" for c in program.commands]
    for command in program.commands:
        lines += _command(command, program)
    return _HEAD + "\n".join(lines) + "\n"


def _command(command: Command, program: Program) -> list[str]:
    here = f"__fish_seen_subcommand_from {command.name}"
    lines = [_option(option, here) for option in command.options]
    if command.keys:
        keys = [f"{key}={word}" for key, words in program.keys.items() for word in words or ("",)]
        lines.append(f"complete -c rlctl -n {_quote(here)} -a {_quote(' '.join(keys))}")
    elif command.paths:
        lines.append(f"complete -c rlctl -n {_quote(here)} -F")
    return lines


def _option(option: Option, condition: str) -> str:
    parts = ["complete -c rlctl", f"-n {_quote(condition)}"]
    parts += [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.value is not None:
        words = list(option.value.words)
        parts.append(_PATHS[option.value.paths])
        if option.value.paths == "folders":
            words.append("(__fish_complete_directories)")
        if words:
            parts.append(f"-a {_quote(' '.join(words))}")
    return " ".join([*parts, f"-d {_quote(option.help)}"])


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
