"""Rows of a train batch as plain data, for another process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey

_PIECE_TOKENS = 1 << 20


class RowData(msgspec.Struct, array_like=True):
    """A row; arrays are the bytes of little-endian numbers, as ``Row`` has them."""

    key: list[int]
    group: int
    prompt_ids: bytes
    response_ids: bytes
    reward: float
    rollout_logprobs: bytes
    versions: bytes
    old_logprobs: bytes | None
    advantages: bytes
    mask: bytes
    turns: list[tuple[int, int]]
    ref_logprobs: bytes | None
    importance: bytes | None


def pack_rows(rows: Sequence[Row]) -> Iterator[list[RowData]]:
    """Yield the rows as data, in pieces that are small enough for a message; the critic's columns stay behind."""
    piece: list[RowData] = []
    tokens = 0
    for row in rows:
        piece.append(_pack(row))
        tokens += row.length
        if tokens >= _PIECE_TOKENS:
            yield piece
            piece, tokens = [], 0
    if piece:
        yield piece


def unpack_rows(data: Sequence[RowData]) -> list[Row]:
    """Return the rows again."""
    return [_unpack(row) for row in data]


def pack_floats(values: npt.NDArray[np.float32]) -> bytes:
    """Return float32 numbers as bytes."""
    return np.ascontiguousarray(values, np.float32).tobytes()


def unpack_floats(data: bytes) -> npt.NDArray[np.float32]:
    """Return the numbers again."""
    return np.frombuffer(data, np.float32).copy()


def _pack(row: Row) -> RowData:
    return RowData(
        key=list(row.key),
        group=row.group,
        prompt_ids=np.asarray(row.prompt_ids, np.int32).tobytes(),
        response_ids=np.asarray(row.response_ids, np.int32).tobytes(),
        reward=float(row.reward),
        rollout_logprobs=pack_floats(row.rollout_logprobs),
        versions=np.asarray(row.versions, np.int64).tobytes(),
        old_logprobs=_optional(row.old_logprobs),
        advantages=pack_floats(row.advantages),
        mask=np.asarray(row.mask, np.bool_).tobytes(),
        turns=row.turns,
        ref_logprobs=_optional(row.ref_logprobs),
        importance=_optional(row.importance),
    )


def _unpack(data: RowData) -> Row:
    def optional(part: bytes | None) -> Any:
        return None if part is None else unpack_floats(part)

    return Row(
        key=RequestKey(*data.key),
        group=data.group,
        prompt_ids=np.frombuffer(data.prompt_ids, np.int32).tolist(),
        response_ids=np.frombuffer(data.response_ids, np.int32).tolist(),
        reward=data.reward,
        rollout_logprobs=unpack_floats(data.rollout_logprobs),
        versions=np.frombuffer(data.versions, np.int64).copy(),
        old_logprobs=optional(data.old_logprobs),
        advantages=unpack_floats(data.advantages),
        mask=np.frombuffer(data.mask, np.bool_).copy(),
        turns=data.turns,
        ref_logprobs=optional(data.ref_logprobs),
        importance=optional(data.importance),
    )


def _optional(values: npt.NDArray[np.float32] | None) -> bytes | None:
    return None if values is None else pack_floats(values)
