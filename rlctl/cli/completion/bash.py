"""The script for bash (3.2 and later, without the bash-completion package)."""

from __future__ import annotations

from collections.abc import Iterable

from rlctl.cli.completion.collect import Command, Option, Program, Value

_HEAD = """\
# Completion of rlctl for bash. Written by `make completions`; starts no Python.
# Use: source this file, or copy it to ~/.local/share/bash-completion/completions/rlctl

"""

_BODY = """\
# Completes a value: words, and files or folders besides.
_rlctl_value() {
  local words=$1 paths=$2 prefix=$3 cur=$4 IFS=$'\\n'
  COMPREPLY=($(compgen -P "$prefix" -W "${words// /$'\\n'}" -- "$cur"))
  case $paths in
    files) COMPREPLY+=($(compgen -P "$prefix" -f -- "$cur")) ;;
    folders) COMPREPLY+=($(compgen -P "$prefix" -d -- "$cur")) ;;
    *) return ;;
  esac
  compopt -o filenames 2>/dev/null
}

# Completes section.key=value.
_rlctl_key() {
  local cur=$1 prefix=''
  if [[ $cur == *=* ]]; then
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=${cur%%=*}=
    _rlctl_key_words "${cur%%=*}"
    _rlctl_value "$_rlctl_words" '' "$prefix" "${cur#*=}"
    return
  fi
  if [[ $cur == *.* ]]; then
    COMPREPLY=($(compgen -S = -W "$_rlctl_keys" -- "$cur"))
  else
    COMPREPLY=($(compgen -S . -W "$_rlctl_sections" -- "$cur"))
  fi
  compopt -o nospace 2>/dev/null
}

_rlctl() {
  local cur prev command='' word i words=() prefix='' assigned='' _rlctl_words='' _rlctl_paths=''
  COMPREPLY=()
  # Bash cuts words at "=" and ":"; put them together again.
  for ((i = 1; i <= COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    if ((${#words[@]})) && [[ $word == [=:]* || ${COMP_WORDS[i-1]} == [=:] ]]; then
      words[${#words[@]}-1]+=$word
    else
      words+=("$word")
    fi
  done
  cur=${words[${#words[@]}-1]} prev=''
  ((${#words[@]} > 1)) && prev=${words[${#words[@]}-2]}
  for ((i = 0; i < ${#words[@]} - 1; i++)); do
    case ${words[i]} in
      --color) ((i++)) ;;
      -*) ;;
      *) command=${words[i]} && break ;;
    esac
  done

  if [[ $cur == --*=* ]]; then
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=${cur%%=*}=
    prev=${cur%%=*} cur=${cur#*=} assigned=1
  fi
  if _rlctl_option_value "$command" "$prev"; then
    _rlctl_value "$_rlctl_words" "$_rlctl_paths" "$prefix" "$cur"
  elif [[ -z $assigned ]]; then
    _rlctl_command "$command" "$cur"
  fi
}

complete -F _rlctl rlctl
"""


def bash_script(program: Program) -> str:
    """Return the script."""
    sections = sorted({key.split(".")[0] for key in program.keys})
    return "".join(
        [
            _HEAD,
            f"_rlctl_sections='{' '.join(sections)}'\n",
            f"_rlctl_keys='{' '.join(program.keys)}'\n\n",
            _key_words(program),
            _option_values(program),
            _commands(program),
            _BODY,
        ]
    )


def _key_words(program: Program) -> str:
    lines = [f"    {key}) _rlctl_words='{' '.join(words)}' ;;\n" for key, words in program.keys.items() if words]
    return (
        "# The words that a key may be set to.\n_rlctl_key_words() {\n  _rlctl_words=''\n  case $1 in\n"
        + "".join(lines)
        + "  esac\n}\n\n"
    )


def _option_values(program: Program) -> str:
    lines = [f"    {_case('', option)}" for option in program.root_options if option.value is not None]
    for command in program.commands:
        lines += [f"    {_case(command.name, option)}" for option in command.options if option.value is not None]
    return (
        "# What follows an option that takes a value; fails for any other word.\n"
        "_rlctl_option_value() {\n  case $1:$2 in\n" + "".join(lines) + "    *) return 1 ;;\n  esac\n}\n\n"
    )


def _case(command: str, option: Option) -> str:
    assert isinstance(option.value, Value)
    names = " | ".join(f"{command}:{name}" for name in option.names)
    return f"{names}) _rlctl_words='{' '.join(option.value.words)}' _rlctl_paths='{option.value.paths}' ;;\n"


def _commands(program: Program) -> str:
    lines = [f"    '') _rlctl_value '{_names(program.root_options)} {' '.join(c.name for c in program.commands)}'"]
    lines[0] += " '' '' \"$2\" ;;\n"
    lines += [_command(command) for command in program.commands]
    return (
        "# The options and other words of a command.\n_rlctl_command() {\n  case $1 in\n"
        + "".join(lines)
        + "  esac\n}\n\n"
    )


def _command(command: Command) -> str:
    other = '_rlctl_key "$2"' if command.keys else f"_rlctl_value '' '{command.paths}' '' \"$2\""
    return (
        f"    {command.name})\n"
        f"      if [[ $2 == -* ]]; then\n"
        f"        _rlctl_value '{_names(command.options)}' '' '' \"$2\"\n"
        f"      else\n"
        f"        {other}\n"
        f"      fi\n"
        f"      ;;\n"
    )


def _names(options: Iterable[Option]) -> str:
    return " ".join(name for option in options for name in option.names if name.startswith("--"))
