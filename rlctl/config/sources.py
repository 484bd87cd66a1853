"""What each source of configuration says: YAML files, environment variables, arguments, flags, mappings.

Every reader turns its source into entries (dotted key, node, origin, place) and adds what is wrong to the findings,
so that one run of the loader reports every fault of every source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.document import (
    MAX_BYTES,
    Mapping,
    Node,
    Scalar,
    describe,
    parse_document,
    shorten,
)
from rlctl.config.keytable import key_table, sections
from rlctl.config.suggestions import nearest_key, unknown_key_fix
from rlctl.config.values import from_python
from rlctl.errors import Finding

ENV_PREFIX = "RLCTL_"

#: Flags that stand for a key.
FLAG_KEYS = {
    "--mode": "trainer.mode",
    "--model": "model.path",
    "--task": "task.name",
    "--steps": "run.steps",
    "--seed": "run.seed",
    "--backend": "sync.backend",
    "--ray-address": "cluster.ray_address",
}
#: What a flag sets beside its own key.
_IMPLIED = {"--ray-address": ("cluster.launcher", "ray")}

_MOST_UNKNOWN = 20


@dataclass(frozen=True)
class Entry:
    """One key set by one source. ``origin`` is shown to users; ``where`` is the place to mend."""

    key: str
    node: Node
    origin: str
    where: str


def read_text(path: str, findings: list[Finding]) -> str | None:
    """Return the text of a configuration file, or None after adding a finding."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            findings.append(Finding(f"larger than {MAX_BYTES >> 20} MiB; that is no configuration", path))
            return None
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        findings.append(Finding(f"not UTF-8 text (byte {error.start})", path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        findings.append(Finding(f"cannot be read: {reason}", path))
    return None


def read_yaml(text: str, name: str, profile: str | None, findings: list[Finding]) -> list[Entry]:
    """Return the entries of a YAML text; ``name`` stands in places, ``profile`` in origins."""
    root = parse_document(text, name, findings)
    if root is None or (isinstance(root, Scalar) and root.is_null):
        return []
    if not isinstance(root, Mapping):
        fix = "start with a section, such as run:"
        findings.append(Finding(f"expected sections with keys, got {describe(root)}", f"{name}:{root.line}", fix))
        return []
    return list(_walk(root, "", _Places(name, profile), findings))


def read_mapping(values: MappingType[str, Any], name: str, findings: list[Finding]) -> list[Entry]:
    """Return the entries of a plain mapping, nested or with dotted keys."""
    nested: dict[str, Any] = {}
    entries: list[Entry] = []
    for key, value in values.items():
        if "." in key:
            entries.extend(_entry(key, from_python(value), name, name, findings))
        else:
            nested[key] = value
    root = from_python(nested)
    assert isinstance(root, Mapping)
    return [*_walk(root, "", _Places(name, None, with_lines=False), findings), *entries]


@dataclass(frozen=True)
class _Places:
    name: str
    profile: str | None
    with_lines: bool = True

    def where(self, line: int) -> str:
        return f"{self.name}:{line}" if self.with_lines else self.name

    def origin(self, line: int) -> str:
        return f"profile {self.profile} ({self.where(line)})" if self.profile else self.where(line)


def _walk(node: Mapping, prefix: str, places: _Places, findings: list[Finding]) -> Iterator[Entry]:
    for key, value in node.items:
        path, where = prefix + key.text, places.where(key.line)
        if "." in key.text:
            findings.append(unknown_key(path, where))
        elif path in key_table():
            yield Entry(path, value, places.origin(key.line), where)
        elif path in sections():
            if isinstance(value, Mapping):
                yield from _walk(value, path + ".", places, findings)
            elif not (isinstance(value, Scalar) and value.is_null):
                findings.append(Finding(f"{path}: expected a section of keys, got {describe(value)}", where))
        else:
            unknown = [(path, key.line)] if not isinstance(value, Mapping) else list(_leaves(value, path, key.line))
            for leaf, line in unknown:
                findings.append(unknown_key(leaf, places.where(line)))


def _leaves(node: Mapping, path: str, line: int) -> list[tuple[str, int]]:
    """Return the first keys below an unknown section, so that each gets its own suggestion."""
    found: list[tuple[str, int]] = []
    level: list[tuple[str, int, Node]] = [(path, line, node)]
    while level and len(found) < _MOST_UNKNOWN:
        path, line, node_here = level.pop(0)
        if isinstance(node_here, Mapping) and node_here.items and path.count(".") < 4:
            level.extend((f"{path}.{k.text}", k.line, v) for k, v in node_here.items[:_MOST_UNKNOWN])
        else:
            found.append((path, line))
    return found


def unknown_key(path: str, where: str) -> Finding:
    """Return the finding for a key that does not exist."""
    shown = shorten_key(path)
    if "." in path and path in key_table():
        section, _, leaf = path.rpartition(".")
        fix = f"nest it: {section.replace('.', ': ')}: {leaf}"
        return Finding(f"{shown}: keys are nested in a file, not dotted", where, fix)
    return Finding(f"{shown}: unknown key", where, unknown_key_fix(path))


def read_overrides(arguments: Iterable[str], findings: list[Finding]) -> list[Entry]:
    """Return the entries of ``key=value`` arguments. ``key=`` means nothing: null where the key may be null."""
    entries: list[Entry] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        key, where = key.strip(), f"argument {argument if len(argument) <= 80 else shorten(argument)}"
        if not equals or not key:
            near = nearest_key(key.lstrip("-+~")) if key else None
            findings.append(Finding("expected key=value", where, f"write {near}=VALUE" if near else None))
        elif key not in key_table() and key.lstrip("-+~") in key_table():
            findings.append(Finding(f"{key}: a key has no prefix here", where, f"write {key.lstrip('-+~')}={text}"))
        else:
            entries.extend(_entry(key, parse_argument(key, text, where, findings), where, where, findings))
    return entries


def parse_argument(key: str, text: str, where: str, findings: list[Finding]) -> Node | None:
    """Return the node for a value given outside a file: a list when the key is one, else the text as it stands."""
    spec = key_table().get(key)
    stripped = text.strip()
    if spec is not None and spec.kind == "list" and stripped.startswith("["):
        faults: list[Finding] = []
        node = parse_document(stripped, where, faults)
        findings.extend(Finding(f"{key}: {fault.message}", where, "write it as [a, b]") for fault in faults[:1])
        return None if faults else node
    if len(stripped) >= 2 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        return Scalar(stripped[1:-1], quoted=True)
    return Scalar(stripped)


def read_environment(variables: MappingType[str, str], findings: list[Finding]) -> list[Entry]:
    """Return the entries of ``RLCTL_SECTION__KEY`` variables; a near miss is a finding, other variables are left be."""
    entries: list[Entry] = []
    flat = {key.replace(".", "_").upper(): key for key in key_table()}
    for name in sorted(variables):
        if not name.startswith(ENV_PREFIX):
            continue
        rest = name.removeprefix(ENV_PREFIX)
        if "__" in rest:
            key = rest.lower().replace("__", ".")
            node = parse_argument(key, variables[name], name, findings)
            if key in key_table():
                entries.extend(_entry(key, node, name, name, findings))
            else:
                near = nearest_key(key)
                findings.append(Finding("no such key", name, f"did you mean {env_name(near)}?" if near else None))
        elif rest.upper() in flat:
            fix = f"did you mean {env_name(flat[rest.upper()])}?"
            findings.append(Finding("sections and keys are joined by two underscores", name, fix))
    return entries


def env_name(key: str) -> str:
    """Return the environment variable that sets ``key``."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def read_flags(flags: MappingType[str, Any], findings: list[Finding]) -> list[Entry]:
    """Return the entries of dedicated flags (``--steps`` and kin); a value of None means "not given"."""
    entries: list[Entry] = []
    for flag, value in flags.items():
        if value is not None:
            node = Scalar(value) if isinstance(value, str) else from_python(value)
            entries.extend(_entry(FLAG_KEYS[flag], node, flag, flag, findings))
            if flag in _IMPLIED:
                key, implied = _IMPLIED[flag]
                entries.extend(_entry(key, Scalar(implied), flag, flag, findings))
    return entries


def _entry(key: str, node: Node | None, origin: str, where: str, findings: list[Finding]) -> Iterator[Entry]:
    if key in key_table():
        if node is not None:
            yield Entry(key, node, origin, where)
    elif key in sections():
        names = [k for k in key_table() if k.startswith(key + ".")]
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        findings.append(Finding(f"{key}: a section, not a key", where, f"set one of its keys: {shown}"))
    else:
        findings.append(Finding(f"{shorten_key(key)}: unknown key", where, unknown_key_fix(key)))


def shorten_key(key: str) -> str:
    """Return a key fit for a message."""
    return key if len(key) <= 80 and key.isprintable() and re.fullmatch(r"[\w.\-]+", key) else shorten(key)
