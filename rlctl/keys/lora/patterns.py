"""Regular expressions out of other people's files, matched as PEFT matches them, and refused when they could hang."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from rlctl.errors import UsageError

T = TypeVar("T")

_MAX_LENGTH = 4096
_MAX_UNBOUNDED = 8
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d*,?\d*\})[?+]?")
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")


def check_pattern(pattern: str, where: str, *, whole: bool = False) -> None:
    """Raise UsageError when ``pattern`` is no regular expression, or one whose matching time could explode.

    Refused are a repeated group that itself repeats or branches (``(a+)+``, ``(a|b)*``) and more than eight unbounded
    repeats: matching those can take time exponential, or of a high power, in the length of a module name. ``whole``
    is for a pattern that must match a whole path (``target_modules``), not the end of one.
    """
    if len(pattern) > _MAX_LENGTH:
        raise UsageError(f"pattern of {len(pattern)} characters is longer than {_MAX_LENGTH}", where=where)
    try:
        re.compile(pattern) if whole else _compiled(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(
            f"{pattern!r:.80} is not a regular expression: {error}",
            where=where,
            fix="patterns are Python regular expressions over module paths; escape a literal bracket with a backslash",
        ) from error
    if _could_hang(pattern):
        raise UsageError(
            f"pattern {pattern!r:.80} repeats a group that repeats or branches, or repeats too often: it may never end",
            where=where,
            fix="write it without nested repeats",
        )


def first_match(patterns: Mapping[str, T], path: str) -> tuple[str, T] | None:
    """Return the first entry whose key matches ``path`` by PEFT's rule, or None."""
    for key, value in patterns.items():
        if key_matches(key, path):
            return key, value
    return None


def key_matches(key: str, path: str) -> bool:
    """Whether a ``rank_pattern``/``alpha_pattern`` key matches: ``(.*\\.)?(KEY)$`` from the start of ``path``."""
    return _compiled(key).match(path) is not None


def is_target(path: str, targets: Sequence[str] | str) -> bool:
    """Whether ``target_modules`` (or ``exclude_modules``) name ``path``.

    A string is a regular expression for the whole path, ``all-linear`` names every path; a list names a path by
    equality or as its suffix at a dot.
    """
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or re.fullmatch(targets, path) is not None
    return any(path == target or path.endswith(f".{target}") for target in targets)


def unmatched_targets(targets: Sequence[str] | str | None, paths: Iterable[str]) -> list[str]:
    """Return the entries of ``targets`` that name none of ``paths``."""
    if targets is None or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return []
    known = list(paths)
    entries: list[Sequence[str] | str] = [targets] if isinstance(targets, str) else [[t] for t in targets]
    missing = [entry for entry in entries if not any(is_target(path, entry) for path in known)]
    return [entry if isinstance(entry, str) else entry[0] for entry in missing]


def layer_index(path: str, layers_pattern: Sequence[str] = ()) -> int | None:
    """Return the first layer number in ``path``; with ``layers_pattern`` the one behind such a name."""
    if not layers_pattern:
        found = re.match(r".*?\.[^.]*\.(\d+)\.", path)
        return int(found.group(1)) if found else None
    for pattern in layers_pattern:
        found = re.match(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", path)
        if found:
            return int(found.group("idx"))
    return None


@lru_cache(maxsize=4096)
def _compiled(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


def _could_hang(pattern: str) -> bool:
    """A cautious reading of the text: every repeat is found, none is judged by what it repeats."""
    groups: list[bool] = []  # for each open group: does it repeat or branch inside?
    unbounded = 0
    position = 0
    while position < len(pattern):
        char = pattern[position]
        position = _behind(pattern, position)
        if char == "(":
            groups.append(False)
            continue
        branches = char == "|" or (char == ")" and bool(groups) and groups.pop())
        repeat = _QUANTIFIER.match(pattern, position)
        repeats = repeat is not None and _UNBOUNDED.match(repeat.group()) is not None
        if repeats and branches and char == ")":
            return True
        if branches or repeats:
            groups[:] = [True] * len(groups)
        unbounded += repeats
        position = repeat.end() if repeat else position
    return unbounded > _MAX_UNBOUNDED


def _behind(pattern: str, position: int) -> int:
    """Return the position behind the atom at ``position``: an escape, a class, a group's opening, one character."""
    char = pattern[position]
    if char == "\\":
        return position + 2
    if char == "[":
        return _end_of_class(pattern, position + 1)
    if char == "(" and pattern[position + 1 : position + 2] == "?":
        return position + 2
    return position + 1


def _end_of_class(pattern: str, position: int) -> int:
    """Return the position behind a ``[...]`` whose opening bracket stands before ``position``."""
    if pattern[position : position + 1] == "^":
        position += 1
    position += 1  # a closing bracket in the first place is literal
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1
