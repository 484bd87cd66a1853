"""Parquet files of prompts and answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlctl.errors import Finding, UsageError
from rlctl.tasks.base import Sample, TaskOptions
from rlctl.tasks.data import DataTask
from rlctl.tasks.packages import need
from rlctl.tasks.rows import sample_of


class ParquetTask(DataTask):
    """Prompts from the rows of a Parquet file, with the fields of a JSONL file's lines."""

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> ParquetTask:
        """Read the file at path ``name``. Raises UsageError if it cannot be read, is empty, or has faults, and
        UnavailableError without pyarrow."""
        path = Path(name)
        parquet = need("pyarrow.parquet", "pyarrow", "a Parquet file")
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "blake2b").digest()
            # Read whole before anything is made of it, so that what is wrong with the file is told as such.
            rows = parquet.read_table(path).to_pylist()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}", where="task.name") from error
        except ValueError as error:
            raise UsageError(f"{path} is no Parquet file: {error}", where="task.name") from error
        return cls(str(path), _samples(path, rows, options), content, options)


def _samples(path: Path, rows: list[dict[str, Any]], options: TaskOptions) -> Iterator[Sample | Finding]:
    for number, row in enumerate(rows, 1):
        source = f"{path}:{number}"
        try:
            yield sample_of(row, source, options)
        except ValueError as error:
            yield Finding(str(error), where=source)
