"""A user's own map of names: rules in a YAML file that say which Hugging Face tensors the stored ones are.

    rules:
      - match: 'transformer\\.h\\.(\\d+)\\.attn\\.c_attn\\.weight'
        to: ['model.layers.\\1.self_attn.q_proj.weight', 'model.layers.\\1.self_attn.k_proj.weight',
             'model.layers.\\1.self_attn.v_proj.weight']
        transpose: true     # stored (in, out)
        split: 0            # cut along this dimension, counted after the transposition
      - match: ['h\\.(\\d+)\\.w1', 'h\\.(\\d+)\\.w3']
        to: 'layers.\\1.gate_up'
        concat: 0           # stored apart, one above the other in the order of the list
      - match: '.*\\.attn\\.bias'
        drop: a constant mask

A pattern must match a whole name; the first rule that does decides. Names that no rule matches stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import Finding, FindingsError, UsageError
from rlctl.keys.lora.patterns import check_pattern
from rlctl.registry import suggest

MAX_BYTES = 1 << 20
MAX_NAME = 512
_MAX_WIDE = 3
# Repeats of something that any name is full of; with a few of them in a row matching takes a high power of the length.
_WIDE = re.compile(r"(?<!\\)(?:\.|\\[SwDW]|\[\^?[^\]]*\])(?:[*+]|\{\d*,\})")
_KEYS = ("match", "to", "split", "sizes", "concat", "transpose", "drop")


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        patterns: one, or several for ``concat``.
        to: templates of the targets' names; several for ``split``.
        split: dimension along which the stored tensor is cut, or None; ``sizes`` of the pieces, where the model does
            not tell them.
        concat: dimension along which stored tensors are put together, or None.
        transpose: the last two dimensions are stored the other way round.
        drop: the reason why matching tensors are left out, or empty.
        where: the place in the file.
    """

    patterns: tuple[re.Pattern[str], ...]
    to: tuple[str, ...]
    split: int | None = None
    sizes: tuple[int, ...] = ()
    concat: int | None = None
    transpose: bool = False
    drop: str = ""
    where: str = ""

    def match(self, name: str) -> tuple[int, tuple[str, ...]] | None:
        """Return (which pattern matched, target names), or None."""
        for place, pattern in enumerate(self.patterns):
            found = pattern.fullmatch(name)
            if found is not None:
                return place, tuple(found.expand(template) for template in self.to)
        return None


def read_map(path: Path) -> list[Rule]:
    """Return the rules of a map file. Raises FindingsError with every fault and its line, UsageError for no YAML."""
    try:
        data = path.read_bytes()[: MAX_BYTES + 1]
    except OSError as error:
        raise UsageError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"larger than {MAX_BYTES} bytes", where=str(path))
    try:
        node = yaml.compose(data.decode("utf-8"), Loader=yaml.SafeLoader)
        content = yaml.safe_load(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8 text", where=str(path)) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"not valid YAML: {error.problem}", where=f"{path}:{line}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"not valid YAML: {error}", where=str(path)) from error
    lines = _lines(node)
    if not isinstance(content, dict) or set(content) != {"rules"} or not isinstance(content["rules"], list):
        raise UsageError("must hold one key, rules, with a list", where=str(path))
    findings: list[Finding] = []
    rules = []
    for index, entry in enumerate(content["rules"]):
        where = f"{path}:{lines[index] if index < len(lines) else 1}"
        rule = _rule(entry, where, findings)
        if rule is not None:
            rules.append(rule)
    if findings:
        raise FindingsError(f"{path}: the map cannot be used", findings)
    return rules


def _lines(node: Any) -> list[int]:
    """Return the line of each entry of ``rules``."""
    if not isinstance(node, yaml.MappingNode):
        return []
    for key, value in node.value:
        if key.value == "rules" and isinstance(value, yaml.SequenceNode):
            return [entry.start_mark.line + 1 for entry in value.value]
    return []


def _rule(entry: Any, where: str, findings: list[Finding]) -> Rule | None:
    before = len(findings)
    if not isinstance(entry, dict):
        findings.append(Finding("a rule must be a mapping", where))
        return None
    for key in entry:
        if key not in _KEYS:
            near = suggest(str(key), _KEYS)
            findings.append(Finding(f"unknown key {key!r}", where, f"did you mean {near!r}?" if near else None))
    patterns = _texts(entry, "match", where, findings, needed=True)
    to = _texts(entry, "to", where, findings, needed="drop" not in entry)
    drop = entry.get("drop", "")
    if not isinstance(drop, str) or ("drop" in entry and (to or not drop)):
        findings.append(Finding("drop must be a reason, and stand without 'to'", where))
    numbers = {key: _number(entry, key, where, findings) for key in ("split", "concat")}
    sizes = entry.get("sizes", [])
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        findings.append(Finding("sizes must be a list of whole numbers", where))
        sizes = []
    transpose = entry.get("transpose", False)
    if not isinstance(transpose, bool):
        findings.append(Finding("transpose must be true or false", where))
    if (len(to) > 1) != (numbers["split"] is not None):
        findings.append(Finding("several names in 'to' go with split, one without", where))
    if (len(patterns) > 1) != (numbers["concat"] is not None):
        findings.append(Finding("several patterns in 'match' go with concat, one without", where))
    if numbers["split"] is not None and numbers["concat"] is not None:
        findings.append(Finding("split and concat do not go together", where))
    compiled = [_compiled(text, where, findings) for text in patterns]
    for pattern in compiled:
        _check_templates(pattern, to, where, findings)
    if len(findings) > before:
        return None
    found = tuple(pattern for pattern in compiled if pattern is not None)
    return Rule(found, to, numbers["split"], tuple(sizes), numbers["concat"], transpose, drop, where)


def _texts(entry: Mapping[str, Any], key: str, where: str, findings: list[Finding], *, needed: bool) -> tuple[str, ...]:
    value = entry.get(key, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        findings.append(Finding(f"{key} must be a string or a list of strings", where))
        return ()
    if needed and not texts:
        findings.append(Finding(f"{key} is missing", where))
    return tuple(texts)


def _number(entry: Mapping[str, Any], key: str, where: str, findings: list[Finding]) -> int | None:
    value = entry.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < 8):
        findings.append(Finding(f"{key} must be a dimension, 0 or more", where))
        return None
    return value


def _compiled(text: str, where: str, findings: list[Finding]) -> re.Pattern[str] | None:
    try:
        check_pattern(text, where, whole=True)
    except UsageError as error:
        findings.append(Finding(error.message, where, error.fix))
        return None
    if len(_WIDE.findall(text)) > _MAX_WIDE:
        findings.append(Finding(f"more than {_MAX_WIDE} open-ended repeats in {text!r:.80}: it may never end", where))
        return None
    return re.compile(text)


def _check_templates(
    pattern: re.Pattern[str] | None, templates: tuple[str, ...], where: str, findings: list[Finding]
) -> None:
    """Find references to groups that the pattern does not have."""
    if pattern is None:
        return
    for template in templates:
        for number, name in re.findall(r"\\(?:(\d+)|g<(\w+)>)", template):
            known = int(number) <= pattern.groups if number else name in pattern.groupindex or name.isdecimal()
            if not known:
                findings.append(Finding(f"{template!r} refers to group {number or name}, which 'match' lacks", where))
