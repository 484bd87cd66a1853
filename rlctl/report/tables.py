"""Plain aligned tables."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# Control characters but for line ends, tabs and what sets a colour: read out of a file, they would move the cursor,
# rename the window or erase what was said before.
_CONTROL = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")
_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?%?")


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return the lines of a table, each ended by a newline. Nothing is cut, whatever the width of the terminal.

    A column of numbers stands right, any other left; None is shown as ``-``. Two spaces part the columns, so that
    ``awk`` and people can both read it.
    """
    cells = [[_text(value) for value in row] for row in rows]
    for row in cells:
        assert len(row) == len(headers), f"{len(row)} cells under {len(headers)} headers"
    widths = [max(map(_width, column)) for column in zip(headers, *cells, strict=True)]
    numeric = [_is_numeric([row[i] for row in cells]) for i in range(len(headers))]
    lines = [_line(line, widths, numeric) for line in ([str(h) for h in headers], *cells)]
    return "".join(f"{line}\n" for line in lines)


def harmless(text: str) -> str:
    """Return a text whose control characters are written out."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())


def _is_numeric(cells: Sequence[str]) -> bool:
    known = [cell for cell in cells if cell != "-"]
    return bool(known) and all(_NUMBER.fullmatch(cell) for cell in known)


def _width(text: str) -> int:
    """Columns that ``text`` takes in a terminal: wide East Asian characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [
        " " * (width - _width(cell)) + cell if right else cell + " " * (width - _width(cell))
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    ]
    return "  ".join(padded).rstrip()
