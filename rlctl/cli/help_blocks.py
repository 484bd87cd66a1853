"""The help texts and the table of profiles inside the documents. ``python -m rlctl.cli.help_blocks`` writes them anew.

A block stands between ``<!-- help: rlctl train -->`` and ``<!-- end of help -->``, or between ``<!-- profiles -->``
and ``<!-- end of profiles -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

from rlctl.cli.leaf import build
from rlctl.cli.root import help_text
from rlctl.config import list_profiles

DOCUMENTS = ("README.md", "docs/cli.md")
# What a terminal of 80 columns shows.
_WIDTH = 78
_BLOCK = re.compile(r"(<!-- help: rlctl ?(?P<name>[a-z-]*) -->\n).*?(<!-- end of help -->)", re.DOTALL)
_PROFILES = re.compile(r"(<!-- profiles -->\n).*?(<!-- end of profiles -->)", re.DOTALL)


def help_of(name: str) -> str:
    """Return the help of a command, or of the program when ``name`` is empty, ended by a newline."""
    if not name:
        return help_text()
    command = build(name)
    context = command.make_context(f"rlctl {name}", [], resilient_parsing=True, terminal_width=_WIDTH)
    return command.get_help(context).rstrip("\n") + "\n"


def renewed(document: str) -> str:
    """Return a document with all its blocks as they should be."""
    helped = _BLOCK.sub(lambda found: f"{found[1]}```text\n{help_of(found['name'])}```\n{found[3]}", document)
    return _PROFILES.sub(lambda found: f"{found[1]}{profile_table()}{found[2]}", helped)


def profile_table() -> str:
    """Return the shipped profiles as a Markdown table."""
    rows = "".join(f"| `{info.name}` | {info.summary} |\n" for info in list_profiles())
    return f"| profile | when to use it |\n|---|---|\n{rows}"


def blocks(document: str) -> list[str]:
    """Return the names of the commands whose help a document holds; the program's own is the empty name."""
    return [found["name"] for found in _BLOCK.finditer(document)]


def main() -> None:
    """Write the blocks of every document anew."""
    for name in DOCUMENTS:
        path = Path(name)
        path.write_text(renewed(path.read_text()))


if __name__ == "__main__":
    main()
