"""A user's own data: one JSON object a line, with a prompt, an answer and a verifier by name or by reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rlctl.errors import Finding, UsageError
from rlctl.tasks.base import Sample, TaskOptions
from rlctl.tasks.data import DataTask
from rlctl.tasks.rows import sample_of


class JsonlTask(DataTask):
    """Prompts from a JSONL file. ``prompt`` is text or a list of chat messages; ``answer`` is text, or a value whose
    JSON is the text; ``group``, if given, is a label for broken-down evaluation. Blank lines are skipped."""

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> JsonlTask:
        """Read the file at path ``name``. Raises UsageError if it cannot be read, is empty, or has faults."""
        path = Path(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}", where="task.name") from error
        return cls(str(path), _rows(path, data, options), data, options)


def _rows(path: Path, data: bytes, options: TaskOptions) -> Iterator[Sample | Finding]:
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            yield sample_of(_decode(line), source, options)
        except ValueError as error:
            yield Finding(str(error), where=source)


def _decode(line: bytes) -> object:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
