"""The ``rlctl`` program: the root command line, and what turns one subcommand's function into a command."""

from rlctl.cli.root import COMMANDS, main

__all__ = ["COMMANDS", "main"]
