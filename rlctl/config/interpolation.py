"""``${section.key}`` and ``${oc.env:NAME}`` in values, by OmegaConf's grammar.

OmegaConf is imported only when a value holds ``${``. A reference reaches plain values only, never another
interpolation: that rules out cycles and exponential growth, and keeps every origin one step away.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType
from typing import Any

from rlctl.config.document import Mapping, Node, Scalar, Sequence, shorten
from rlctl.config.keytable import plain as as_json
from rlctl.config.values import MAX_TEXT, ValueFaultError, from_python

_PENDING = "${rlctl.pending}"


def has_interpolation(node: Node) -> bool:
    """Whether a value holds ``${``, escaped or not."""
    if isinstance(node, Sequence):
        return any(has_interpolation(item) for item in node.items)
    if isinstance(node, Mapping):
        return any(has_interpolation(item) for _, item in node.items)
    return isinstance(node, Scalar) and "${" in node.text


def escape(text: str) -> str:
    """Return ``text`` written so that interpolation gives it back unchanged."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def interpolate(key: str, node: Node, plain: MappingType[str, Any], pending: set[str]) -> Node:
    """Return ``node`` with its references replaced.

    Args:
        key: dotted key of the value.
        plain: dotted key -> value of every key that holds no interpolation.
        pending: the keys that hold one.

    Raises ValueFaultError.
    """
    if isinstance(node, Sequence):
        return Sequence([interpolate(key, item, plain, pending) for item in node.items], node.line)
    if isinstance(node, Mapping):
        return Mapping([(name, interpolate(key, item, plain, pending)) for name, item in node.items], node.line)
    if "${" not in node.text:
        return node
    if len(node.text) > MAX_TEXT:
        raise ValueFaultError(f"a text of {len(node.text)} characters; at most {MAX_TEXT} are taken")
    value = _resolve(key, node.text, plain, pending)
    if isinstance(value, str):
        return Scalar(value, node.quoted, node.line)
    return from_python(value)


def _resolve(key: str, text: str, plain: MappingType[str, Any], pending: set[str]) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree: dict[str, Any] = {}
    for path, value in plain.items():
        # A plain value never holds "${" but may be OmegaConf's own mark for a missing value.
        _put(tree, path, _PENDING if path in pending or value == "???" else as_json(value))
    _put(tree, key, text)
    try:
        value = OmegaConf.select(OmegaConf.create(tree), key, throw_on_resolution_failure=True)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as err:
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        if "rlctl.pending" in reason:
            reason = "it refers to a value that is itself an interpolation"
        raise ValueFaultError(f"{shorten(text)} cannot be resolved: {reason[:200]}", "write the value itself") from err


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[leaf] = value
