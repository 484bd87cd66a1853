"""Completion scripts for bash, zsh and fish, generated from the commands; they start no Python when they run."""

from rlctl.cli.completion.bash import bash_script
from rlctl.cli.completion.collect import collect
from rlctl.cli.completion.fish import fish_script
from rlctl.cli.completion.zsh import zsh_script

__all__ = ["scripts"]


def scripts() -> dict[str, str]:
    """Return every script by the name of its file."""
    program = collect()
    return {"rlctl.bash": bash_script(program), "_rlctl": zsh_script(program), "rlctl.fish": fish_script(program)}
