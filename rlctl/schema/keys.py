"""How a configuration key is declared: its default, its meaning and, where it has one, its unit or range."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Unit = Literal["bytes", "seconds"]


def key(
    default: Any,
    doc: str,
    *,
    unit: Unit | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """Return a dataclass field for one configuration key.

    Args:
        default: value when nobody sets the key; a list or dict is copied for each instance. None means "the mode's
            own value" or "not set", as ``doc`` says; ``dataclasses.MISSING`` that it must be set.
        doc: what the key does, in one or two sentences, as printed in the key reference.
        unit: "bytes" (``512MiB`` accepted) or "seconds" (``30s`` accepted).
        low, high: inclusive bounds of a number.
        above: exclusive lower bound of a number.
    """
    metadata = {"doc": doc, "unit": unit, "low": low, "high": high, "above": above}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, doc: str) -> Any:
    """Return a dataclass field that holds a group of keys."""
    return dataclasses.field(default_factory=cls, metadata={"doc": doc})
