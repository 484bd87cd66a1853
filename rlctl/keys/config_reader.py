"""Typed look-ups in a model's config.json that gather every fault instead of stopping at the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.errors import Finding, FindingsError

_MISSING = object()


class ConfigReader:
    """Reads keys of ``config`` with their type and range checked.

    Faults are kept in ``findings`` and the default (or a harmless value) is returned, so that one pass reports all;
    call ``check()`` before any returned value is used.

    Args:
        config: the parsed JSON object.
        where: how messages name it, usually the file.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where
        self.findings: list[Finding] = []

    def check(self) -> None:
        """Raise FindingsError when any look-up found a fault."""
        if self.findings:
            raise FindingsError(f"{self.where}: the model configuration cannot be used", self.findings)

    def fault(self, message: str, fix: str | None = None) -> None:
        """Note one fault."""
        self.findings.append(Finding(message, self.where, fix))

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = 1 << 31) -> int:
        """Return the first of ``names`` that is present and not null, else ``default``; None as default: required."""
        value = self._first(names)
        if value is _MISSING or value is None:
            if default is None:
                self.fault(f"{' or '.join(names)} is missing")
                return low
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fault(f"{names[0]} must be a whole number from {low} to {high}, not {value!r:.80}")
            return low
        return value

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return a true/false value; null counts as absent."""
        value = self._first((name,))
        if value is _MISSING or value is None:
            return default
        if not isinstance(value, bool):
            self.fault(f"{name} must be true or false, not {value!r:.80}")
            return default
        return value

    def text(self, *names: str) -> str | None:
        """Return the first of ``names`` that holds a string, or None when none is present."""
        value = self._first(names)
        if value is _MISSING or value is None:
            return None
        if not isinstance(value, str):
            self.fault(f"{names[0]} must be a string, not {value!r:.80}")
            return None
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers >= 0; absent and null are the empty list."""
        value = self._first((name,))
        if value is _MISSING or value is None:
            return ()
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
            self.fault(f"{name} must be a list of whole numbers, not {value!r:.80}")
            return ()
        return tuple(value)

    def section(self, name: str) -> ConfigReader | None:
        """Return a reader of the object under ``name`` that shares this one's findings, or None when absent."""
        value = self._first((name,))
        if value is _MISSING or value is None:
            return None
        if not isinstance(value, dict):
            self.fault(f"{name} must be an object, not {value!r:.80}")
            return None
        inner = ConfigReader(value, f"{self.where}: {name}")
        inner.findings = self.findings
        return inner

    def _first(self, names: tuple[str, ...]) -> Any:
        for name in names:
            value = self.config.get(name, _MISSING)
            if value is not _MISSING and value is not None:
                return value
        return _MISSING
