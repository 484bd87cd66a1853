"""Which steps a person asks for."""

from __future__ import annotations

import re

from rlctl.errors import UsageError

_RANGE = re.compile(r"(\d*):(\d*)")


def parse_steps(text: str | None, where: str = "--step") -> tuple[int | None, int | None]:
    """Return the bounds of ``N``, ``A:B``, ``A:`` or ``:B``, both included; None where there is none.

    Raises:
        UsageError: it is none of these.
    """
    if text is None:
        return None, None
    if text.isascii() and text.isdigit():
        return int(text), int(text)
    match = _RANGE.fullmatch(text) if text.isascii() else None
    if match is None or text == ":":
        raise UsageError(f"{text!r} is no step", where=where, fix="give N, A:B, A: or :B")
    first, last = (int(part) if part else None for part in match.groups())
    if first is not None and last is not None and first > last:
        raise UsageError(f"{text}: the last step is before the first", where=where)
    return first, last
