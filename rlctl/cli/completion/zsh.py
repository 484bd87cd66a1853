"""The script for zsh, for a folder of fpath."""

from __future__ import annotations

from rlctl.cli.completion.collect import Command, Option, Paths, Program

_HEAD = """\
#compdef rlctl
# Completion of rlctl for zsh. Written by `make completions`; starts no Python.
# Use: copy it as _rlctl to a folder of $fpath, before compinit runs.

"""

_ACTIONS: dict[Paths, str] = {"": "", "files": "_files", "folders": "_files -/"}


def zsh_script(program: Program) -> str:
    """Return the script."""
    return "".join([_HEAD, _keys(program), _root(program), '_rlctl "$@"\n'])


def _keys(program: Program) -> str:
    values = "".join(f"      {key}) compadd -- {' '.join(words)} ;;\n" for key, words in program.keys.items() if words)
    return (
        "# Completes section.key=value.\n"
        "_rlctl_key() {\n"
        "  if compset -P '*='; then\n"
        "    case ${IPREFIX%=} in\n"
        f"{values}"
        "      *) _files ;;\n"
        "    esac\n"
        "  else\n"
        f"    compadd -S = -- {' '.join(program.keys)}\n"
        "  fi\n"
        "}\n\n"
    )


def _root(program: Program) -> str:
    commands = "".join(f"    {_quote(f'{c.name}:{_plain(c.help)}')}\n" for c in program.commands)
    options = "".join(f"    {spec} \\\n" for option in program.root_options for spec in _specs(option))
    cases = "".join(_command(command) for command in program.commands)
    return (
        "_rlctl() {\n"
        "  local curcontext=$curcontext state line\n"
        "  typeset -A opt_args\n"
        f"  local -a commands=(\n{commands}  )\n"
        "  _arguments -C -s \\\n"
        f"{options}"
        "    '1: :->command' \\\n"
        "    '*:: :->arguments'\n"
        "  case $state in\n"
        "    command) _describe command commands ;;\n"
        "    arguments)\n"
        "      curcontext=${curcontext%:*}-$words[1]:\n"
        "      case $words[1] in\n"
        f"{cases}"
        "      esac\n"
        "      ;;\n"
        "  esac\n"
        "}\n\n"
    )


def _command(command: Command) -> str:
    specs = [spec for option in command.options for spec in _specs(option)]
    if command.keys:
        specs.append("'*:key=value:_rlctl_key'")
    elif command.paths:
        specs.append(f"'*:file:{_ACTIONS[command.paths]}'")
    lines = " \\\n".join(f"            {spec}" for spec in specs)
    return f"        {command.name})\n          _arguments -s \\\n{lines}\n          ;;\n"


def _specs(option: Option) -> list[str]:
    """Return one ``_arguments`` specification for each name of an option."""
    again = "*" if option.again else f"({' '.join(option.names)})"
    return [_quote(f"{again}{name}{_value(option, name)}") for name in option.names]


def _value(option: Option, name: str) -> str:
    text = f"[{_plain(option.help)}]"
    if option.value is None:
        return text
    assign = "=" if name.startswith("--") else "+"
    label = option.names[-1].lstrip("-")
    words = " ".join(option.value.words)
    action = _ACTIONS[option.value.paths]
    if words and action:
        action = f'_alternative "words\\:{label}\\:({words})" "files\\:file\\:{action}"'
    elif words:
        action = f"({words})"
    return f"{assign}{text}:{label}:{action}"


def _plain(text: str) -> str:
    """Return help text without what ``_arguments`` and ``_describe`` read as their own."""
    return text.rstrip(".").replace("\\", "").replace("[", "(").replace("]", ")").replace(":", " -")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
