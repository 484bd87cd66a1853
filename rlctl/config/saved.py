"""The resolved configuration of a run as JSON, for run directories and scripts.

Reading a file that another release wrote: a key that this release does not have is left out and reported as a note;
a key that the file does not have takes its default; a value that does not fit its key is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rlctl
from rlctl.config.keytable import flatten, key_table, plain, set_value
from rlctl.config.load import DEFAULT_ORIGIN, Resolved
from rlctl.config.values import ValueFaultError, convert, from_python
from rlctl.errors import Finding, FindingsError, UsageError
from rlctl.schema import Config

SCHEMA = "rlctl.config/1"


def to_json(resolved: Resolved) -> dict[str, Any]:
    """Return the JSON form: ``schema``, ``rlctl_version``, ``profile``, nested ``config``, ``origins`` by key."""
    nested: dict[str, Any] = {}
    for path, value in flatten(resolved.config).items():
        *parents, leaf = path.split(".")
        node = nested
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = plain(value)
    return {
        "schema": SCHEMA,
        "rlctl_version": rlctl.__version__,
        "profile": resolved.profile,
        "config": nested,
        "origins": {path: resolved.origin(path) for path in key_table()},
    }


def from_json(document: Any, where: str) -> Resolved:
    """Return what ``to_json`` saved. Raises UsageError for another schema, FindingsError for bad values."""
    if (
        not isinstance(document, dict)
        or document.get("schema") != SCHEMA
        or not isinstance(document.get("config"), dict)
    ):
        raise UsageError(f"not a configuration saved by rlctl ({SCHEMA})", where=where)
    config, findings, notes = Config(), [], []
    table = key_table()
    for path, value in _flatten(document["config"], ""):
        if path not in table:
            notes.append(Finding(f"{path}: not a key of this release; left out", where))
            continue
        try:
            set_value(config, path, convert(table[path], from_python(value)))
        except ValueFaultError as fault:
            findings.append(Finding(f"{path}: {fault}", where, fault.fix))
    if findings:
        raise FindingsError("saved configuration", findings)
    saved = document.get("origins")
    origins = saved if isinstance(saved, dict) else {}
    profile = document.get("profile")
    return Resolved(
        config,
        {path: str(origins.get(path, DEFAULT_ORIGIN)) for path in table},
        profile if isinstance(profile, str) else None,
        tuple(notes),
    )


def _flatten(node: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in node.items():
        path = prefix + name
        if isinstance(value, dict) and path not in key_table() and path.count(".") < 4:
            found.extend(_flatten(value, path + "."))
        else:
            found.append((path, value))
    return found


def read_saved(path: Path) -> Resolved:
    """Return the configuration saved at ``path``. Raises UsageError when it is absent or no JSON."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path)) from error
    return from_json(document, str(path))
