"""Which steps a person asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlctl.errors import UsageError
from rlctl.ops.replay.history import History

_STEP = re.compile(r"\d{1,18}", re.ASCII)
_RANGE = re.compile(r"(\d{0,18}):(\d{0,18})", re.ASCII)


def parse_steps(text: str | None, where: str = "--step") -> tuple[int | None, int | None]:
    """Return the bounds of ``N``, ``A:B``, ``A:`` or ``:B``, both included; None where there is none.

    Raises:
        UsageError: it is none of these.
    """
    if text is None:
        return None, None
    if _STEP.fullmatch(text):
        return int(text), int(text)
    match = _RANGE.fullmatch(text)
    if match is None or text == ":":
        raise UsageError(f"{text[:80]!r} is no step", where=where, fix="give N, A:B, A: or :B")
    first, last = (int(part) if part else None for part in match.groups())
    if first is not None and last is not None and first > last:
        raise UsageError(f"{text}: the last step is before the first", where=where)
    return first, last


def chosen_steps(
    history: History, there: Sequence[int], first: int | None, last: int | None, *, anomalies: bool = False
) -> list[int]:
    """Return the steps of ``there`` within bounds; with ``anomalies`` those that are pinned.

    Raises:
        UsageError: there is none.
    """
    found = [
        step
        for step in there
        if (first is None or step >= first)
        and (last is None or step <= last)
        and (not anomalies or step in history.pinned)
    ]
    if not found:
        which = "no step was odd" if anomalies else "no such step"
        known = f"steps {there[0]} to {there[-1]} are there" if there else "there is none"
        known += " so far" if history.under_way else ""
        raise UsageError(f"{which}: {known}", where="--anomalies" if anomalies else "--step")
    return found
