"""What a stream can show: colours, a moving panel, characters beyond ASCII."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TextIO

ColorChoice = Literal["auto", "always", "never"]

_CODES = {"red": "31", "yellow": "33", "green": "32", "bold": "1", "dim": "2"}


@dataclass(frozen=True)
class Terminal:
    """What one stream can show.

    Attributes:
        color: colour codes are wanted. ``--color`` decides; else NO_COLOR, then FORCE_COLOR, then whether it is a
            terminal that knows them.
        moving: a panel may redraw itself. Only on a terminal that can move its cursor and not under CI, whatever the
            colour settings say: a pipe never gets a carriage return or an escape sequence of this kind.
        unicode: the encoding has block characters.
        width: columns; 80 where there is no terminal.
    """

    color: bool
    moving: bool
    unicode: bool
    width: int = 80

    @classmethod
    def of(cls, stream: TextIO, choice: ColorChoice = "auto", environment: Mapping[str, str] | None = None) -> Terminal:
        """Look at a stream and at the environment (that of this process when None)."""
        env = os.environ if environment is None else environment
        terminal = stream.isatty() and env.get("TERM") != "dumb"
        if choice == "auto":
            forced = env.get("FORCE_COLOR", "") not in ("", "0")
            color = not env.get("NO_COLOR") and (forced or terminal)
        else:
            color = choice == "always"
        continuous_integration = env.get("CI", "").lower() not in ("", "0", "false", "no", "off")
        return cls(
            color=color,
            moving=terminal and not continuous_integration,
            unicode=_has_blocks(stream.encoding),
            width=shutil.get_terminal_size().columns if terminal else 80,
        )

    def paint(self, text: str, *styles: str) -> str:
        """Return ``text`` in the named styles (red, yellow, green, bold, dim), or as it is without colour."""
        if not self.color or not styles:
            return text
        return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"


def _has_blocks(encoding: str | None) -> bool:
    try:
        "▁█".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
