"""Bytes, durations and switches as people write them: ``512MiB``, ``2GB``, ``30s``, ``1h30m``, ``on``."""

from __future__ import annotations

import math
import re

_BYTES = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3, "t": 1000**4, "tb": 1000**4,
    "ki": 1 << 10, "kib": 1 << 10, "mi": 1 << 20, "mib": 1 << 20,
    "gi": 1 << 30, "gib": 1 << 30, "ti": 1 << 40, "tib": 1 << 40,
}  # fmt: skip
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SWITCHES = {"0": False, "1": True, "false": False, "true": True, "no": False, "yes": True, "off": False, "on": True}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)"
_BYTES_RE = re.compile(rf"^\s*{_NUMBER}\s*([a-zA-Z]*)\s*$")
_DURATION_PART = re.compile(rf"\s*{_NUMBER}\s*(us|ms|min|s|m|h|d)", re.IGNORECASE)


def parse_bytes(text: str | float) -> int:
    """Return a number of bytes. Plain numbers are bytes; ``MB`` is 10^6, ``MiB`` is 2^20. Raises ValueError."""
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a size")
    if isinstance(text, int | float):
        value = float(text)
    else:
        match = _BYTES_RE.match(text)
        if match is None or match.group(2).lower() not in _BYTES:
            raise ValueError(f"{text!r} is not a size; write 512MiB, 2GB or a number of bytes")
        value = float(match.group(1)) * _BYTES[match.group(2).lower()]
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise ValueError(f"{text!r} is not a whole, non-negative number of bytes")
    return int(value)


def format_bytes(count: float) -> str:
    """Return ``count`` bytes with a binary unit and at most three significant places."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.0f} TiB" if abs(value) >= 100 else f"{value:.3g} TiB"


def parse_duration(text: str | float) -> float:
    """Return seconds. Plain numbers are seconds; ``1h30m``, ``250ms`` are accepted. Raises ValueError."""
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a duration")
    if isinstance(text, int | float) or re.fullmatch(rf"\s*{_NUMBER}\s*", text):
        value = float(text)
    else:
        value, position = 0.0, 0
        while position < len(text.rstrip()):
            match = _DURATION_PART.match(text, position)
            if match is None:
                raise ValueError(f"{text!r} is not a duration; write 30s, 250ms, 1h30m or a number of seconds")
            value += float(match.group(1)) * _SECONDS[match.group(2).lower()]
            position = match.end()
        if position == 0:
            raise ValueError(f"{text!r} is not a duration; write 30s, 250ms, 1h30m or a number of seconds")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text!r} is not a finite, non-negative duration")
    return value


def format_duration(seconds: float) -> str:
    """Return ``seconds`` in the unit a person would choose: ``850 ms``, ``12.3 s``, ``4m05s``, ``2h10m``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def parse_switch(text: str) -> bool:
    """Return what 0/1, true/false, yes/no, on/off (in any case) mean. Raises ValueError."""
    try:
        return _SWITCHES[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{text!r} is no switch; write true or false (also 1/0, yes/no, on/off)") from None
