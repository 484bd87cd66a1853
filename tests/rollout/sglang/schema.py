"""Bodies held to the classes that SGLang parses them into; see ``make_schema``."""

from __future__ import annotations

import ast
import json
from typing import Any

from tests.rollout.sglang.make_schema import SCHEMA

DOCUMENT: dict[str, Any] = json.loads(SCHEMA.read_text())
_PLAIN = {"str": str, "bool": bool, "dict": dict}


def faults(path: str, method: str, body: dict[str, Any] | None) -> list[str]:
    """Return what is wrong with a request, in words."""
    endpoint = DOCUMENT["endpoints"].get(path)
    if endpoint is None:
        return [f"no path {path}"]
    if method not in endpoint["methods"]:
        return [f"{path} takes {endpoint['methods']}, not {method}"]
    if endpoint["body"] is None:
        return [] if body is None else [f"{path} takes no body"]
    found = faults_of(endpoint["body"], body)
    if path == "/generate" and body is not None:
        found += faults_of("SamplingParams", body.get("sampling_params"))
    return found


def faults_of(name: str, body: object) -> list[str]:
    """Return what is wrong with one object of a class."""
    if not isinstance(body, dict):
        return [f"{name}: {body!r} is no object"]
    return faults_in(name, DOCUMENT["classes"][name], body)


def option_faults(options: dict[str, Any]) -> list[str]:
    """Return what is wrong with the server's options, named as on its command line."""
    return faults_in("ServerArgs", DOCUMENT["options"], {k.replace("-", "_"): v for k, v in options.items()})


def faults_in(name: str, fields: dict[str, Any], body: dict[str, Any]) -> list[str]:
    """Return unknown fields, missing ones, and values of other types than those of ``fields``."""
    found = [f"{name} has no field {key}" for key in body if key not in fields]
    found += [f"{name} needs {key}" for key, field in fields.items() if field["required"] and key not in body]
    for key in body.keys() & fields.keys():
        if not fits(body[key], ast.parse(fields[key]["type"], mode="eval").body):
            found.append(f"{name}.{key}: {body[key]!r} is no {fields[key]['type']}")
    return found


def fits(value: object, kind: ast.expr) -> bool:
    """Whether a value of JSON can be of a type as it is written in SGLang."""
    if isinstance(kind, ast.Constant):
        return value is None if kind.value is None else value == kind.value
    if isinstance(kind, ast.Name):
        return _fits_name(value, kind.id)
    assert isinstance(kind, ast.Subscript), ast.unparse(kind)
    outer, inner = ast.unparse(kind.value), kind.slice
    parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
    match outer:
        case "Optional":
            return value is None or fits(value, parts[0])
        case "Union" | "Literal":
            return any(fits(value, part) for part in parts)
        case "Annotated":
            return fits(value, parts[0])
        case "List" | "Set" | "list" | "set":
            return isinstance(value, list) and all(fits(one, parts[0]) for one in value)
        case "Dict":
            return isinstance(value, dict) and all(fits(k, parts[0]) and fits(v, parts[1]) for k, v in value.items())
    raise AssertionError(f"a type that is not understood: {ast.unparse(kind)}")


def _fits_name(value: object, name: str) -> bool:
    if name == "Any":
        return True
    if name == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, _PLAIN[name])
