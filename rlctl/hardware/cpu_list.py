"""Lists of CPUs and NUMA nodes as the kernel and nvidia-smi write them: ``0-47,96-143``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_MOST = 1 << 16


def parse_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in order, each once; nothing for an empty text or ``N/A``. Raises ValueError."""
    if text.strip() in ("", "N/A"):
        return ()
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is neither a number nor a range such as 0-47")
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high < _MOST:
            raise ValueError(f"{part.strip()!r} is no range: from the lower to the higher, below {_MOST}")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def format_list(numbers: Iterable[int]) -> str:
    """Return numbers as a list with ranges; the empty text for none."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{low}-{high}" if low != high else str(low) for low, high in parts)
