"""What every event has."""

from __future__ import annotations

import msgspec


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Event(msgspec.Struct, tag_field="kind", tag=_snake, kw_only=True, omit_defaults=True):
    """Base of all events."""

    seq: int = -1
    time: float = 0.0
    attempt: int = 0
