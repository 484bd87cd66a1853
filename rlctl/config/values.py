"""One written value into the type that its key wants."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, asdict, is_dataclass
from typing import Any

from rlctl.config.document import Mapping, Node, Scalar, Sequence, describe, shorten
from rlctl.config.keytable import KeySpec
from rlctl.registry import suggest
from rlctl.units import parse_bytes, parse_duration, parse_switch

MAX_TEXT = 4096
_MAX_DEPTH = 8
_MAX_INT = 2**63 - 1
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


class ValueFaultError(Exception):
    """A value that its key cannot take; the text says why, ``fix`` what to write."""

    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(message)
        self.fix = fix


def convert(spec: KeySpec, node: Node) -> Any:
    """Return the value of ``node`` in the type of ``spec``. Raises ValueFaultError."""
    if isinstance(node, Scalar) and node.is_null:
        if spec.optional:
            return None
        raise ValueFaultError(f"expected {spec.type_name}, got nothing", _empty_fix(spec))
    if spec.kind == "list":
        return _convert_list(spec, node)
    if not isinstance(node, Scalar):
        raise ValueFaultError(f"expected {spec.type_name}, got {describe(node)}")
    value = _CONVERTERS[spec.kind](spec, node)
    _check_bounds(spec, value)
    return value


def _empty_fix(spec: KeySpec) -> str:
    if spec.kind == "str":
        return "write '' for the empty text, or leave it out for its default"
    return "leave it out for its default"


def _convert_list(spec: KeySpec, node: Node) -> list[Any]:
    if not isinstance(node, Sequence):
        raise ValueFaultError(f"expected {spec.type_name}, got {describe(node)}", "write it as [a, b]")
    assert spec.item is not None
    if spec.record is not None:
        return [_convert_record(spec, item, number) for number, item in enumerate(node.items, 1)]
    values = []
    for item in node.items:
        if not isinstance(item, Scalar) or item.is_null:
            raise ValueFaultError(f"expected {spec.type_name}, got {describe(item)} in the list")
        values.append(_CONVERTERS[spec.item](spec, item))
    return values


def _convert_record(spec: KeySpec, node: Node, number: int) -> Any:
    known = {field.path: field for field in spec.fields}
    keys = ", ".join(known)
    if not isinstance(node, Mapping):
        raise ValueFaultError(f"item {number}: expected {{{keys}}}, got {describe(node)}")
    assert spec.record is not None
    values = {}
    for key, item in node.items:
        if key.text not in known:
            near = suggest(key.text, known)
            hint = f"did you mean {near!r}? " if near else ""
            raise ValueFaultError(f"item {number}: unknown key {shorten(key.text)}", f"{hint}known: {keys}")
        try:
            values[key.text] = convert(known[key.text], item)
        except ValueFaultError as fault:
            raise ValueFaultError(f"item {number}: {key.text}: {fault}", fault.fix) from None
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise ValueFaultError(f"item {number} has no {name}", f"write {{{name}: ...}}")
    return spec.record(**values)


def _text(_spec: KeySpec, node: Scalar) -> str:
    if len(node.text) > MAX_TEXT:
        raise ValueFaultError(f"a text of {len(node.text)} characters; at most {MAX_TEXT} are taken")
    if any("\ud800" <= c <= "\udfff" or c == "\0" for c in node.text):
        raise ValueFaultError(f"{shorten(node.text)} holds bytes that are no text")
    return node.text


def _choice(spec: KeySpec, node: Scalar) -> str:
    if node.text in spec.choices:
        return node.text
    near = suggest(node.text, spec.choices)
    hint = f"did you mean {near!r}? " if near else ""
    raise ValueFaultError(f"unknown value {shorten(node.text)}", f"{hint}known: {', '.join(spec.choices)}")


def _bool(_spec: KeySpec, node: Scalar) -> bool:
    try:
        return parse_switch(node.text)
    except ValueError:
        fix = "write true or false (also 1/0, yes/no, on/off)"
        raise ValueFaultError(f"expected bool, got {describe(node)}", fix) from None


def _int(spec: KeySpec, node: Scalar) -> int:
    if spec.unit == "bytes":
        return int(_with_unit(spec, node, parse_bytes))
    number = _number(spec, node)
    if number % 1:
        raise ValueFaultError(f"expected int, got {describe(node)}")
    if abs(number) > _MAX_INT:
        raise ValueFaultError(f"{shorten(node.text)} is too large")
    digits = node.text.strip()
    return int(digits) if digits.lstrip("+-").isdigit() else int(number)


def _float(spec: KeySpec, node: Scalar) -> float:
    return _with_unit(spec, node, parse_duration) if spec.unit == "seconds" else _number(spec, node)


def _with_unit(spec: KeySpec, node: Scalar, parse: Callable[[str], float]) -> float:
    try:
        value = parse(node.text)
    except ValueError as error:
        example = "512MiB or 2GB" if spec.unit == "bytes" else "30s, 250ms or 1h30m"
        raise ValueFaultError(f"expected {spec.type_name}, got {describe(node)}", f"write {example}") from error
    if value > _MAX_INT:
        raise ValueFaultError(f"{shorten(node.text)} is too large")
    return value


def _number(spec: KeySpec, node: Scalar) -> float:
    text = node.text.strip()
    if not _NUMBER.fullmatch(text) or len(text) > 64:
        raise ValueFaultError(f"expected {spec.type_name}, got {describe(node)}")
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueFaultError(f"{shorten(text)} is too large for a number")
    return value


def _check_bounds(spec: KeySpec, value: Any) -> None:
    if spec.low is not None and value < spec.low:
        raise ValueFaultError(f"{value!r} is too small; the least is {_plain(spec.low)}")
    if spec.above is not None and value <= spec.above:
        raise ValueFaultError(f"{value!r} is too small; it must be above {_plain(spec.above)}")
    if spec.high is not None and value > spec.high:
        raise ValueFaultError(f"{value!r} is too large; the most is {_plain(spec.high)}")


def _plain(number: float) -> str:
    return f"{number:g}"


_CONVERTERS: dict[str, Callable[[KeySpec, Scalar], Any]] = {
    "str": _text,
    "choice": _choice,
    "bool": _bool,
    "int": _int,
    "float": _float,
}


def from_python(value: Any, depth: int = 0) -> Node:
    """Return the node that stands for a plain Python value (None, bool, number, str, list, dict, dataclass).

    No key holds anything nested deeper than a few levels, so what lies below is cut.
    """
    if depth > _MAX_DEPTH:
        return Mapping()
    if value is None:
        return Scalar("null")
    if isinstance(value, bool):
        return Scalar("true" if value else "false")
    if isinstance(value, int | float):
        return Scalar(repr(value))
    if isinstance(value, str):
        return Scalar(value, quoted=True)
    if isinstance(value, list | tuple):
        return Sequence([from_python(item, depth + 1) for item in value])
    if is_dataclass(value) and not isinstance(value, type):
        return from_python(asdict(value), depth)
    if isinstance(value, dict):
        return Mapping([(Scalar(str(key)), from_python(item, depth + 1)) for key, item in value.items()])
    raise TypeError(f"{type(value).__name__} cannot be a configuration value")
