"""YAML text into nodes that remember their lines, with bounds that no hostile file can pass.

Scalars stay text: the schema, not YAML 1.1, decides what ``1e-5``, ``no`` or ``010`` mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlctl.errors import Finding

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_NODES = 20_000

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TEXT_TAG = "tag:yaml.org,2002:str"
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass(frozen=True)
class Scalar:
    """One value as written; ``quoted`` tells ``"null"`` from ``null``."""

    text: str
    quoted: bool = False
    line: int = 0

    @property
    def is_null(self) -> bool:
        """Whether YAML means "nothing" here."""
        return not self.quoted and self.text in _NULLS


@dataclass
class Sequence:
    """A list of nodes."""

    items: list[Node] = field(default_factory=list)
    line: int = 0


@dataclass
class Mapping:
    """Keys with their nodes, in order, duplicates already refused."""

    items: list[tuple[Scalar, Node]] = field(default_factory=list)
    line: int = 0


Node = Scalar | Sequence | Mapping


class _UnusableError(Exception):
    """A fault after which the rest of the text says nothing."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def parse_document(text: str, name: str, findings: list[Finding]) -> Node | None:
    """Return the root node of ``text``, or None when it is empty or unusable; ``name`` stands in the places.

    Refused: duplicate keys (both lines are named), tags, recursive anchors, more than one document, nesting beyond
    ``MAX_DEPTH``. Anchors and merge keys (``<<``) work; aliases share nodes, so that nothing is expanded here.
    """
    builder = _Builder(name, findings)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = min(mark.line + 1 if mark is not None else 1, max(1, len(text.splitlines())))
        reason = ", ".join(str(part) for part in (error.context, error.problem) if part)
        findings.append(Finding(f"not valid YAML: {reason}", f"{name}:{line}"))
        return None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        findings.append(Finding(f"not valid YAML: {reason}", name))
        return None
    except _UnusableError as error:
        findings.append(error.finding)
        return None
    return builder.root


class _Builder:
    """Events in, nodes out, without recursion."""

    def __init__(self, name: str, findings: list[Finding]) -> None:
        self.name = name
        self.root: Node | None = None
        self.findings = findings
        self._stack: list[Sequence | _OpenMapping] = []
        self._anchors: dict[str, Node] = {}
        self._documents = 0
        self._nodes = 0

    def take(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents == 2:
                self._fatal("a second document starts here", line, "keep one document in a file")
        elif isinstance(event, yaml.ScalarEvent):
            self._check_tag(event, line)
            quoted = event.style in ("'", '"', "|", ">") or event.tag == _TEXT_TAG
            self._add(Scalar(event.value, quoted, line), event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(str(event.anchor), line)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._check_tag(event, line)
            opened = _OpenMapping(line) if isinstance(event, yaml.MappingStartEvent) else Sequence(line=line)
            if len(self._stack) >= MAX_DEPTH:
                self._fatal(f"nested deeper than {MAX_DEPTH} levels", line)
            self._add(opened.node if isinstance(opened, _OpenMapping) else opened, event.anchor)
            self._stack.append(opened)
        elif isinstance(event, yaml.CollectionEndEvent):
            closed = self._stack.pop()
            if isinstance(closed, _OpenMapping):
                self.findings.extend(closed.close(self.name))
                self._count(len(closed.node.items), line)

    def _add(self, node: Node, anchor: str | None) -> None:
        self._count(1, node.line)
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._stack:
            self.root = node
            return
        top = self._stack[-1]
        if isinstance(top, Sequence):
            top.items.append(node)
        else:
            self.findings.extend(top.take(node, self.name))

    def _count(self, nodes: int, line: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self._fatal(f"more than {MAX_NODES} values", line)

    def _alias(self, anchor: str, line: int) -> None:
        node = self._anchors.get(anchor)
        if node is None:
            self._fatal(f"alias *{anchor} has no anchor above it", line)
        elif any(node is (s.node if isinstance(s, _OpenMapping) else s) for s in self._stack):
            self._fatal(f"alias *{anchor} stands inside its own anchor", line)
        else:
            self._add(node, None)

    def _check_tag(self, event: Any, line: int) -> None:
        if event.tag is not None and event.tag not in (_TEXT_TAG, "!"):
            self.findings.append(Finding(f"tag {event.tag} is not used here", f"{self.name}:{line}", "remove it"))

    def _fatal(self, message: str, line: int, fix: str | None = None) -> None:
        raise _UnusableError(Finding(message, f"{self.name}:{line}", fix))


class _OpenMapping:
    """A mapping whose end has not come yet."""

    def __init__(self, line: int) -> None:
        self.node = Mapping(line=line)
        self._key: Node | None = None
        self._seen: dict[str, int] = {}
        self._merges: list[Node] = []

    def take(self, node: Node, name: str) -> Iterator[Finding]:
        if self._key is None:
            self._key = node
            return
        key, self._key = self._key, None
        if not isinstance(key, Scalar):
            yield Finding("a key must be a word, not a list or a mapping", f"{name}:{key.line}")
        elif key.text in self._seen:
            message = f"key {shorten(key.text)} appears twice, on lines {self._seen[key.text]} and {key.line}"
            yield Finding(message, f"{name}:{key.line}", "keep one of them")
        else:
            self._seen[key.text] = key.line
            if key.text == "<<" and not key.quoted:
                self._merges.extend(node.items if isinstance(node, Sequence) else [node])
                return
            self.node.items.append((key, node))

    def close(self, name: str) -> Iterator[Finding]:
        """Add what ``<<`` brings, own keys first, as YAML's merge key is defined."""
        for merged in self._merges:
            if not isinstance(merged, Mapping):
                yield Finding("<< takes a mapping or a list of mappings", f"{name}:{self.node.line}")
                return
            for key, node in merged.items:
                if key.text not in self._seen:
                    self._seen[key.text] = key.line
                    self.node.items.append((key, node))


def shorten(text: str, limit: int = 60) -> str:
    """Return ``text`` quoted for a message, cut in the middle when it is long."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 4 :]}"
    return repr(text)


def describe(node: Node) -> str:
    """Return what a node is, as a message names it: ``str 'eight'``, ``list [a, b]``."""
    if isinstance(node, Mapping):
        return f"a mapping of {len(node.items)} keys"
    if isinstance(node, Sequence):
        return f"a list of {len(node.items)}"
    if node.is_null:
        return "null"
    return f"{_guess(node)} {shorten(node.text)}"


def _guess(node: Scalar) -> str:
    if node.quoted:
        return "str"
    if node.text.lower() in ("true", "false", "yes", "no", "on", "off"):
        return "bool"
    try:
        return "float" if float(node.text) % 1 or not node.text.strip().lstrip("+-").isdigit() else "int"
    except ValueError:
        return "str"
