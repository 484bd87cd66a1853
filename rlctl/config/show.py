"""A resolved configuration as YAML with the origin of each value, fit to be fed back as ``--config``."""

from __future__ import annotations

import re
from typing import Any

from rlctl.config.interpolation import escape
from rlctl.config.keytable import KeySpec, flatten, key_table, sections
from rlctl.config.load import Resolved

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_RESERVED = frozenset({"null", "true", "false", "yes", "no", "on", "off"})
_BINARY_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def show_config(resolved: Resolved) -> str:
    """Return every key as YAML, its origin as a comment. Reading it back gives an equal configuration."""
    values = flatten(resolved.config)
    lines: list[tuple[str, str]] = []
    opened: set[str] = set()
    for path, spec in key_table().items():
        parts = path.split(".")
        for depth in range(1, len(parts)):
            section = ".".join(parts[:depth])
            if section not in opened:
                opened.add(section)
                lines.append((f"{'  ' * (depth - 1)}{parts[depth - 1]}:", sections()[section].doc))
        text = f"{'  ' * (len(parts) - 1)}{parts[-1]}: {format_value(spec, values[path])}"
        lines.append((text, resolved.origin(path)))
    width = min(48, max(len(text) for text, _ in lines))
    return "".join(f"{text.ljust(width)}  # {_comment(note)}\n" for text, note in lines)


def _comment(note: str) -> str:
    return "".join(c if c.isprintable() and ord(c) < 0xD800 else "?" for c in note)


def format_value(spec: KeySpec, value: Any) -> str:
    """Return a value of ``spec`` as one line of YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if spec.record is not None:
        return f"[{', '.join(_format_record(spec, item) for item in value)}]"
    if isinstance(value, list):
        return f"[{', '.join(_format_scalar(spec, item) for item in value)}]"
    return _format_scalar(spec, value)


def _format_record(spec: KeySpec, record: Any) -> str:
    """Return a record as a mapping of what is not its default."""
    values = [(field, getattr(record, field.path)) for field in spec.fields]
    said = (f"{field.path}: {format_value(field, value)}" for field, value in values if value != field.default)
    return f"{{{', '.join(said)}}}"


def _format_scalar(spec: KeySpec, value: Any) -> str:
    if isinstance(value, str):
        return _format_text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if spec.unit == "bytes" and value:
        for size, unit in _BINARY_UNITS:
            if value % size == 0:
                return f"{value // size}{unit}"
    text = repr(value)
    if isinstance(value, float):
        # "5e-05" is a string to YAML 1.1 readers, "5.0e-05" a number to all.
        text = re.sub(r"^(-?\d+)e", r"\1.0e", text)
        return f"{text.removesuffix('.0')}s" if spec.unit == "seconds" else text
    return text


def _format_text(value: str) -> str:
    text = escape(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return '"' + "".join(_escape_char(c) for c in text) + '"'


def _escape_char(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if " " <= char <= "~":
        return char
    return f"\\U{ord(char):08X}"
