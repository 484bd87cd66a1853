"""Rows of a step as flat columns, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey, Segment

Array = npt.NDArray[Any]
Columns = dict[str, Array]

# Columns of one number a token that a row may lack, with their names in ``Row``.
_OPTIONAL = ("old_logprobs", "ref_logprobs", "values", "returns", "importance", "train_logprobs")
_DTYPES: Mapping[str, Any] = {
    "round_rows": np.int64, "key": np.int64, "group": np.int64, "cut": np.bool_,
    "task_reward": np.float64, "reward": np.float64, "score": np.float64,
    "prompt_ids": np.int32, "prompt_offsets": np.int64, "response_ids": np.int32, "offsets": np.int64,
    "rollout_logprobs": np.float32, "mask": np.bool_, "advantages": np.float32,
    "turns": np.int32, "turn_offsets": np.int64, "segments": np.int64, "segment_offsets": np.int64,
    "observations": np.uint8,
    **dict.fromkeys(_OPTIONAL, np.float32), **{f"{name}.rows": np.bool_ for name in _OPTIONAL},
}  # fmt: skip
_ONCE = ("score", "observations", *_OPTIONAL, *(f"{name}.rows" for name in _OPTIONAL))


class ColumnError(ValueError):
    """Columns that do not make rows; the message names the column first."""


class SegmentSpan(msgspec.Struct, frozen=True, gc=False):
    """Tokens ``begin`` to ``end`` of a response, made in one go, or an observation of the model's turn ``turn``."""

    begin: int
    end: int
    version: int
    replica: str
    turn: int = 0
    observation: bool = False


@dataclass(frozen=True)
class RoundRows:
    """Rows of a local update, after it, with what a row does not hold.

    Attributes:
        rows: sorted by key.
        task_rewards: of each row, before a reward model's score was mixed in.
        scores: float64, the reward model's, of each row; None without one.
        cut: of each row, whether its response was cut at its longest length.
        segments: of each row, in order.
    """

    rows: Sequence[Row]
    task_rewards: Sequence[float]
    cut: Sequence[bool]
    segments: Sequence[Sequence[SegmentSpan]]
    scores: npt.NDArray[np.float64] | None = None


def spans_of(segments: Sequence[Segment]) -> list[SegmentSpan]:
    """Return where the segments of a response lie in it."""
    spans, end = [], 0
    for segment in segments:
        begin, end = end, end + len(segment.token_ids)
        spans.append(SegmentSpan(begin, end, segment.version, segment.replica, segment.turn, segment.observation))
    return spans


def to_columns(rounds: Sequence[RoundRows]) -> tuple[Columns, list[str]]:
    """Return the columns of a step's rounds, and the names that its segments index."""
    rows = [row for one in rounds for row in one.rows]
    spans = [row for one in rounds for row in one.segments]
    replicas = sorted({span.replica for row in spans for span in row})
    place = {name: index for index, name in enumerate(replicas)}
    columns: dict[str, Any] = {
        "round_rows": [len(one.rows) for one in rounds],
        "key": np.array([tuple(row.key) for row in rows], np.int64).reshape(-1, 3),
        "group": [row.group for row in rows],
        "cut": [cut for one in rounds for cut in one.cut],
        "task_reward": [reward for one in rounds for reward in one.task_rewards],
        "reward": [row.reward for row in rows],
        "prompt_ids": [token for row in rows for token in row.prompt_ids],
        "prompt_offsets": _offsets([len(row.prompt_ids) for row in rows]),
        "response_ids": [token for row in rows for token in row.response_ids],
        "offsets": _offsets([len(row.response_ids) for row in rows]),
        "rollout_logprobs": _joined([row.rollout_logprobs for row in rows]),
        "mask": _joined([row.mask for row in rows]),
        "advantages": _joined([row.advantages for row in rows]),
        "turns": np.array([turn for row in rows for turn in row.turns], np.int32).reshape(-1, 2),
        "turn_offsets": _offsets([len(row.turns) for row in rows]),
        "segments": np.array(
            [(s.begin, s.end, s.version, place[s.replica], s.turn, s.observation) for row in spans for s in row],
            np.int64,
        ).reshape(-1, 6),
        "segment_offsets": _offsets([len(row) for row in spans]),
    }
    scores = [one.scores for one in rounds if one.scores is not None]
    if scores:
        columns["score"] = np.concatenate(scores)
    if any(row.observations for row in rows):
        columns["observations"] = np.frombuffer(msgspec.json.encode([row.observations for row in rows]), np.uint8)
    for name in _OPTIONAL:
        parts = [getattr(row, name) for row in rows]
        if any(part is not None for part in parts):
            columns[name] = _joined([part for part in parts if part is not None])
            columns[f"{name}.rows"] = [part is not None for part in parts]
    return {name: np.ascontiguousarray(value, _DTYPES[name]) for name, value in columns.items()}, replicas


def from_columns(columns: Mapping[str, Array], replicas: Sequence[str]) -> list[RoundRows]:
    """Return the rounds again.

    Raises:
        ColumnError: a column is absent, foreign, of another type, or does not fit the others.
    """
    _check(columns)
    sizes = columns["round_rows"].tolist()
    count = len(columns["group"])
    if any(size < 0 for size in sizes) or sum(sizes) != count:
        raise ColumnError(f"round_rows: {sum(sizes)} rows in all, but there are {count}")
    prompts = _ragged(columns, "prompt_ids", "prompt_offsets", count)
    responses = _ragged(columns, "response_ids", "offsets", count)
    turns, spans = (
        _ragged(columns, "turns", "turn_offsets", count),
        _ragged(columns, "segments", "segment_offsets", count),
    )
    tokens = {name: _ragged(columns, name, "offsets", count) for name in ("rollout_logprobs", "mask")}
    optional = {name: _present(columns, name, count) for name in _OPTIONAL}
    observations = _observations(columns, count)
    advantages = _advantages(columns, count)
    rows = [
        Row(
            key=RequestKey(*key),
            group=group,
            prompt_ids=prompts[i].tolist(),
            response_ids=responses[i].tolist(),
            reward=float(columns["reward"][i]),
            rollout_logprobs=tokens["rollout_logprobs"][i].copy(),
            versions=_versions(spans[i], len(responses[i])),
            advantages=advantages[i],
            turns=[(begin, end) for begin, end in turns[i].tolist()],
            observations=observations[i],
            mask=tokens["mask"][i].copy(),
            score=float(columns["score"][i]) if "score" in columns else None,
            **{name: parts[i] for name, parts in optional.items()},
        )
        for i, (key, group) in enumerate(zip(columns["key"].tolist(), columns["group"].tolist(), strict=True))
    ]
    if len({row.key for row in rows}) != len(rows):
        raise ColumnError("key: two rows have the same")
    segments = [[_span(span, replicas) for span in row.tolist()] for row in spans]
    rounds, end = [], 0
    for size in sizes:
        begin, end = end, end + size
        rounds.append(
            RoundRows(
                rows=rows[begin:end],
                task_rewards=columns["task_reward"][begin:end].tolist(),
                cut=columns["cut"][begin:end].tolist(),
                segments=segments[begin:end],
                scores=columns["score"][begin:end].copy() if "score" in columns else None,
            )
        )
    return rounds


def _check(columns: Mapping[str, Array]) -> None:
    if absent := [name for name in _DTYPES if name not in columns and name not in _ONCE]:
        raise ColumnError(f"{absent[0]}: not there")
    if foreign := sorted(columns.keys() - _DTYPES.keys()):
        raise ColumnError(f"{foreign[0]}: not a column of a record")
    for name, column in columns.items():
        width = {"key": 3, "turns": 2, "segments": 6}.get(name)
        if column.dtype != _DTYPES[name] or column.ndim != (1 if width is None else 2):
            raise ColumnError(f"{name}: {column.dtype} of {column.ndim} dimensions")
        if width is not None and column.shape[1] != width:
            raise ColumnError(f"{name}: {column.shape[1]} numbers an entry, not {width}")
    for name in ("prompt_ids", "response_ids"):
        if (columns[name] < 0).any():
            raise ColumnError(f"{name}: {columns[name].min()} is no token")
    count = len(columns["group"])
    for name in ("key", "cut", "task_reward", "reward", "score"):
        if name in columns and len(columns[name]) != count:
            raise ColumnError(f"{name}: {len(columns[name])} entries for {count} rows")


def _versions(spans: Array, tokens: int) -> Array:
    begins, ends = spans[:, 0], spans[:, 1]
    if (
        len(spans) == 0
        or begins[0] != 0
        or ends[-1] != tokens
        or (begins[1:] != ends[:-1]).any()
        or (ends < begins).any()
    ):
        raise ColumnError(f"segments: they do not make up a response of {tokens} tokens")
    return np.repeat(spans[:, 2], ends - begins)


def _ragged(columns: Mapping[str, Array], name: str, offsets: str, count: int) -> list[Array]:
    ends = columns[offsets]
    if len(ends) != count + 1 or ends[0] != 0 or (np.diff(ends) < 0).any():
        raise ColumnError(f"{offsets}: not the bounds of {count} rows")
    if ends[-1] != len(columns[name]):
        raise ColumnError(f"{name}: {len(columns[name])} entries, {offsets} ends at {ends[-1]}")
    return np.split(columns[name], ends[1:-1]) if count else []


def _present(columns: Mapping[str, Array], name: str, count: int) -> list[Array | None]:
    if name not in columns and f"{name}.rows" not in columns:
        return [None] * count
    if name not in columns or f"{name}.rows" not in columns:
        raise ColumnError(f"{name}: without its rows, or they without it")
    has = columns[f"{name}.rows"]
    if len(has) != count:
        raise ColumnError(f"{name}.rows: {len(has)} entries for {count} rows")
    lengths = np.where(has, np.diff(columns["offsets"]), 0)
    if lengths.sum() != len(columns[name]):
        raise ColumnError(f"{name}: {len(columns[name])} numbers for {lengths.sum()} tokens")
    parts = np.split(columns[name], np.cumsum(lengths)[:-1]) if count else []
    return [part.copy() if there else None for part, there in zip(parts, has.tolist(), strict=True)]


def _advantages(columns: Mapping[str, Array], count: int) -> list[Array]:
    if not len(columns["advantages"]):
        return [np.zeros(0, np.float32) for _ in range(count)]
    return [part.copy() for part in _ragged(columns, "advantages", "offsets", count)]


def _observations(columns: Mapping[str, Array], count: int) -> list[list[str]]:
    if "observations" not in columns:
        return [[] for _ in range(count)]
    try:
        found = msgspec.json.decode(columns["observations"].tobytes(), type=list[list[str]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ColumnError(f"observations: {error}") from error
    if len(found) != count:
        raise ColumnError(f"observations: of {len(found)} rows, but there are {count}")
    return found


def _span(span: list[int], replicas: Sequence[str]) -> SegmentSpan:
    begin, end, version, replica, turn, observation = span
    if not 0 <= replica < len(replicas):
        raise ColumnError(f"segments: no replica {replica} of {len(replicas)}")
    return SegmentSpan(begin, end, version, replicas[replica], turn, bool(observation))


def _offsets(lengths: Iterable[int]) -> Array:
    return np.array([0, *accumulate(lengths)], np.int64)


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)
