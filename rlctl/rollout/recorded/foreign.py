"""Responses out of a JSONL file of anybody's making. Nothing is filled in: what does not belong together is refused.

A line is an object with ``prompt_ids``, ``response_ids``, ``logprobs`` (natural log, one for each response token) and
``reward``; lines of one ``group`` (or, without it, of equal ``prompt_ids``) are answers to one prompt. It may have
``id`` (unique), ``version`` (of the weights, 0 when not given) or ``versions`` (one a token, all alike), ``segments``
(``{"begin", "end", "version", "replica"}``, where a response is of several versions), ``finish_reason`` (``stop`` or
``length``) and ``label``.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.errors import Finding, UsageError
from rlctl.experience.rows import MisalignedError, check_aligned
from rlctl.experience.segments import FinishReason, Segment
from rlctl.rollout.recorded.trajectories import NAME, WHERE, Group, Limits, Trajectory, faults_of, require_usable

MOST_LINE = 64 << 20
_MOST = 1 << 53  # whole numbers beyond have no place in a float


class _FaultError(ValueError):
    """What is wrong with a line, and what to do."""

    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(message)
        self.fix = fix


def read_jsonl(path: Path, limits: Limits) -> list[Group]:
    """Return the groups of a file, in the order of their first lines.

    Raises:
        UsageError: it cannot be read, or is empty.
        FindingsError: every line that cannot be trained, with its number and why.
    """
    groups: dict[Any, Group] = {}
    seen: dict[Any, int] = {}
    findings: list[Finding] = []
    if not path.is_file():  # a pipe would be waited on, and cannot be read again when the run is resumed
        raise UsageError(f"{path} is no regular file", where=WHERE, fix="write the responses into a file first")
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                if not (line := file.readline(MOST_LINE + 1)):
                    break
                try:
                    _take(_parsed(line), number, path, groups, seen)
                except _FaultError as fault:
                    findings.append(Finding(str(fault), f"{path}:{number}", fault.fix))
                if len(line) > MOST_LINE:
                    break
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", where=WHERE) from error
    found = list(groups.values())
    if not findings:  # a line that was left out makes its group short, which is no second fault
        findings += faults_of(found, limits)
    else:
        wrong = [finding for finding in faults_of(found, limits) if "the group has" not in finding.message]
        findings += wrong
    require_usable(found, findings, str(path))
    return found


def _parsed(line: bytes) -> dict[str, Any]:
    if len(line) > MOST_LINE:
        raise _FaultError(f"the line is longer than {MOST_LINE} bytes", "nothing behind it was read")
    try:
        record = json.loads(line, object_pairs_hook=_once)
    except _FaultError:
        raise
    except (ValueError, RecursionError) as error:
        cut = not line.endswith(b"\n")
        raise _FaultError(
            f"the line is {'cut' if cut else 'not JSON'}: {error}",
            "remove it" if cut else None,
        ) from error
    if not isinstance(record, dict):
        raise _FaultError("the line is not an object")
    return record


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _FaultError(f"{name} is given twice")
        found[name] = value
    return found


def _take(record: dict[str, Any], number: int, path: Path, groups: dict[Any, Group], seen: dict[Any, int]) -> None:
    name, place = record.get("id"), f"{path}:{number}"
    if not isinstance(name, str | int | None):
        raise _FaultError("id is neither a word nor a number")
    if name is not None and name in seen:
        raise _FaultError(f"id {name} was given in line {seen[name]} already", "each response counts once")
    ids = _ids(record, "response_ids")
    prompt = _ids(record, "prompt_ids")
    segments = _segments(record, ids)
    reward = _reward(record.get("reward"))
    reason = record.get("finish_reason", "stop")
    if reason not in ("stop", "length"):
        raise _FaultError(f"finish_reason is {reason!r}, not stop or length", "a response that goes on is not whole")
    key = record.get("group", tuple(prompt))
    if not isinstance(key, str | int | tuple):
        raise _FaultError("group is neither a word nor a number")
    group = groups.setdefault(key, Group(prompt, label=str(record.get("label", "")), place=place))
    if group.prompt_ids != prompt:
        raise _FaultError(f"its group has another prompt, in {group.place}", "answers to one prompt make up a group")
    if name is not None:
        seen[name] = number
    finish: FinishReason = "length" if reason == "length" else "stop"
    group.trajectories.append(Trajectory(segments, reward, finish, place=place))


def _ids(record: dict[str, Any], field: str) -> list[int]:
    ids = record.get(field)
    if ids is None:
        raise _FaultError(
            f"there are no {field}", "text alone cannot be used: encoding it again need not give the same tokens"
        )
    if not isinstance(ids, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise _FaultError(f"{field} are not whole numbers")
    if not ids:
        raise _FaultError(f"the {field.removesuffix('_ids')} is empty: it has no token", "leave it out")
    return ids


def _segments(record: dict[str, Any], ids: list[int]) -> list[Segment]:
    logprobs = record.get("logprobs")
    if logprobs is not None and not (isinstance(logprobs, list) and all(x is None or _real(x) for x in logprobs)):
        raise _FaultError("logprobs are not numbers")
    try:
        check_aligned(ids, logprobs, "the response")
    except MisalignedError as error:
        raise _FaultError(
            error.message, error.fix or "nothing is filled in: a log-prob of 0 would claim certainty"
        ) from error
    assert logprobs is not None
    for position, value in enumerate(logprobs):
        if value > 1e-3:
            raise _FaultError(
                f"the log-prob at token {position} of {len(ids)} is {value}, above 0", "give natural logs"
            )
    values = [float(value) for value in logprobs]
    if "segments" in record:
        return _cut(record["segments"], ids, values)
    return [Segment(ids, values, _version(record, len(ids)), NAME)]


def _version(record: dict[str, Any], tokens: int) -> int:
    versions = record.get("versions")
    if versions is None:
        versions = [record.get("version", 0)] * tokens
    elif not isinstance(versions, list) or len(versions) != tokens:
        count = len(versions) if isinstance(versions, list) else "no"
        raise _FaultError(f"the response has {tokens} token ids but {count} versions")
    if not all(isinstance(version, int) and 0 <= version < _MOST for version in versions):
        raise _FaultError("a version is not a whole number of at least 0")
    if len(set(versions)) > 1:
        low, high = min(versions), max(versions)
        raise _FaultError(
            f"its tokens are of mixed versions, {low} to {high}", "say by segments which tokens are of which version"
        )
    return int(versions[0])


def _cut(segments: Any, ids: list[int], logprobs: list[float]) -> list[Segment]:
    found: list[Segment] = []
    end = 0
    for segment in segments if isinstance(segments, list) else [None]:
        if not isinstance(segment, dict) or not all(
            isinstance(segment.get(n), int) for n in ("begin", "end", "version")
        ):
            raise _FaultError("segments are not objects with begin, end and version")
        begin, stop, version = segment["begin"], segment["end"], segment["version"]
        if begin != end or stop <= begin or not 0 <= version < _MOST or (found and version < found[-1].version):
            raise _FaultError(f"segment {begin} to {stop} of version {version} does not follow what is before it")
        found.append(Segment(ids[begin:stop], logprobs[begin:stop], version, str(segment.get("replica", NAME))))
        end = stop
    if end != len(ids):
        raise _FaultError(f"segments end at token {end} of {len(ids)}")
    return found


def _reward(value: Any) -> float:
    if not _real(value) or not math.isfinite(value):
        raise _FaultError(f"the reward is {'absent' if value is None else value}", "give a finite number")
    return float(value)


def _real(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST)
