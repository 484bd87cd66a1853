"""Data sets of the Hugging Face hub, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from rlctl.errors import Finding, UsageError
from rlctl.tasks.base import Sample, TaskOptions
from rlctl.tasks.data import DataTask
from rlctl.tasks.packages import need
from rlctl.tasks.rows import sample_of


class HubTask(DataTask):
    """Prompts from the rows of a data set that the package datasets loads: of the hub, its cache, or a folder."""

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> HubTask:
        """Load ``hub:PATH``, ``hub:PATH:SUBSET`` or ``hub:PATH:SUBSET:SPLIT`` (train without one; SUBSET may be
        empty). Raises UsageError if it cannot be loaded or has faults, and UnavailableError without datasets."""
        path, subset, split, *more = (*name.split(":")[1:], "", "")[: max(3, name.count(":"))]
        if not path or more:
            raise UsageError(f"{name!r} is no data set", where="task.name", fix="write hub:PATH[:SUBSET[:SPLIT]]")
        datasets = need("datasets", "datasets", "a data set of the hub")
        try:
            rows = datasets.load_dataset(path, subset or None, split=split or "train")
        except (OSError, ValueError) as error:
            # What the library raises for no such data set, subset, split, or no network.
            reason = " ".join(str(error).split())[:300]
            raise UsageError(f"{path} cannot be loaded: {reason}", where="task.name") from error
        content = hashlib.blake2b()
        for row in rows:
            content.update(repr(row).encode("utf-8", "surrogatepass"))
        return cls(name, _samples(name, rows, options), content.digest(), options)


def _samples(name: str, rows: Iterable[object], options: TaskOptions) -> Iterator[Sample | Finding]:
    for number, row in enumerate(rows, 1):
        source = f"{name}:{number}"
        try:
            yield sample_of(row, source, options)
        except ValueError as error:
            yield Finding(str(error), where=source)
