"""Recorded responses as lines of their own, for other programs and for ``rollout.engine=recorded:FILE``.

One object a response; those of one ``group`` answer one prompt. ``response_ids``, ``logprobs`` and ``versions`` have
one entry a response token; a log-prob is null where nobody drew the token (what the task said between turns).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlctl.errors import RlctlError, UnavailableError, UsageError
from rlctl.experience.records.errors import AbsentError
from rlctl.experience.records.reading import Bundle
from rlctl.experience.rows import Row
from rlctl.ops.output_place import require_place, whole_file
from rlctl.ops.replay.history import History
from rlctl.ops.replay.texts import Decode, decoder_of
from rlctl.tasks.packages import need

SCHEMA = "rlctl.trajectory/1"
_FORMATS = (".jsonl", ".parquet")
_ROWS_AT_ONCE = 4096


def require_export(path: Path, where: str = "--export") -> None:
    """Raise what keeps an export from being written, before the work.

    Raises:
        UsageError: the name is of no known format, or no file can be written there.
        UnavailableError: pyarrow is not installed.
    """
    if path.suffix not in _FORMATS:
        raise UsageError(f"{path.name}: an export is {' or '.join(_FORMATS)}", where=where)
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise UnavailableError("a Parquet file needs pyarrow", where=where, fix="pip install pyarrow, or export .jsonl")
    require_place(path, where)


def export(
    history: History, steps: Sequence[int], path: Path, advance: Callable[[float], None] = lambda _: None
) -> int:
    """Write the responses of recorded steps, by step, prompt and sample, and return how many; the file appears whole
    or not at all.

    Raises:
        RecordError: a record is not whole, or not there any more.
        RlctlError: the file cannot be written.
    """
    write = _write_parquet if path.suffix == ".parquet" else _write_jsonl
    try:
        with whole_file(path) as file:
            count = write(file, _lines(history, steps, advance))
    except OSError as error:
        fix = "free space there, or name another place"
        raise RlctlError(
            f"the export cannot be written: {error.strerror or error}", where=str(path), fix=fix
        ) from error
    return count


def _lines(history: History, steps: Sequence[int], advance: Callable[[float], None]) -> Iterator[dict[str, Any]]:
    decode = decoder_of(history)
    reasons = {(told.ordinal, told.sample): told.reason for step in history.steps.values() for told in step.samples}
    for step in steps:
        bundle = history.bundle(step)
        if bundle is None:
            raise AbsentError(history.record_folder(step), f"the record of step {step} was let go meanwhile")
        for line in step_lines(bundle, decode):
            yield {**line, "finish_reason": reasons.get((line["ordinal"], line["sample"])) or line["finish_reason"]}
        advance(1)


def step_lines(bundle: Bundle, decode: Decode | None) -> Iterator[dict[str, Any]]:
    """Yield the lines of one step's responses."""
    manifest = bundle.manifest
    for one in bundle.rounds:
        groups = {group.ordinal: group for group in one.groups}
        for row, reward, segments, cut in zip(one.rows, one.task_rewards, one.segments, one.cut, strict=True):
            group = groups.get(row.group)
            yield {
                "schema": SCHEMA,
                "id": "/".join(map(str, row.key)),
                "group": row.group,
                "step": manifest.step,
                "ordinal": row.key.ordinal,
                "sample": row.key.sample,
                "row": group.row if group is not None else None,
                "task": group.task if group is not None else "",
                "label": group.label if group is not None else "",
                "prompt": decode(row.prompt_ids) if decode is not None else None,
                "response": decode(row.response_ids) if decode is not None else None,
                "prompt_ids": list(row.prompt_ids),
                "response_ids": list(row.response_ids),
                "logprobs": _logprobs(row),
                "versions": row.versions.tolist(),
                "reward": reward,
                "trained_reward": row.reward,
                "finish_reason": "length" if cut else "stop",
                "turns": [list(turn) for turn in row.turns],
                "observations": list(row.observations),
                "segments": [
                    {"begin": s.begin, "end": s.end, "version": s.version, "replica": s.replica, "turn": s.turn,
                     "observation": s.observation}
                    for s in segments
                    if s.end > s.begin
                ],
                "advantages": [float(a) if np.isfinite(a) else None for a in row.advantages],
            }  # fmt: skip


def _logprobs(row: Row) -> list[float | None]:
    drawn = row.sampled & np.isfinite(row.rollout_logprobs)
    return [float(value) if there else None for value, there in zip(row.rollout_logprobs, drawn, strict=True)]


def _write_jsonl(file: BinaryIO, lines: Iterator[dict[str, Any]]) -> int:
    count = 0
    for line in lines:
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        count += 1
    return count


def _write_parquet(file: BinaryIO, lines: Iterator[dict[str, Any]]) -> int:
    pyarrow = need("pyarrow", "pyarrow", "a Parquet file")
    parquet = need("pyarrow.parquet", "pyarrow", "a Parquet file")
    schema, count = _schema(pyarrow), 0
    with parquet.ParquetWriter(file, schema) as writer:
        part: list[dict[str, Any]] = []
        for line in lines:
            part.append(line)
            count += 1
            if len(part) >= _ROWS_AT_ONCE:
                writer.write_table(pyarrow.Table.from_pylist(part, schema))
                part = []
        writer.write_table(pyarrow.Table.from_pylist(part, schema))
    return count


def _schema(pyarrow: Any) -> Any:
    """Stated, not guessed: of an empty list nobody can tell what it holds."""
    text, whole, real, yes = pyarrow.string(), pyarrow.int64(), pyarrow.float64(), pyarrow.bool_()
    segment = {"begin": whole, "end": whole, "version": whole, "replica": text, "turn": whole, "observation": yes}
    return pyarrow.schema(
        {
            "schema": text, "id": text, "group": whole, "step": whole, "ordinal": whole, "sample": whole,
            "row": whole, "task": text,
            "label": text, "prompt": text, "response": text, "prompt_ids": pyarrow.list_(whole),
            "response_ids": pyarrow.list_(whole), "logprobs": pyarrow.list_(real), "versions": pyarrow.list_(whole),
            "reward": real, "trained_reward": real, "finish_reason": text,
            "turns": pyarrow.list_(pyarrow.list_(whole)), "observations": pyarrow.list_(text),
            "segments": pyarrow.list_(pyarrow.struct(list(segment.items()))), "advantages": pyarrow.list_(real),
        }
    )  # fmt: skip
