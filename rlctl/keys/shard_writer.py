"""Writing a checkpoint of a known layout, tensor by tensor in any order, copying unchanged bytes inside the kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlctl.keys.byte_copy import copy_range, pwrite_all
from rlctl.keys.dtypes import dtype_code
from rlctl.keys.shard_layout import Placed, ShardLayout
from rlctl.keys.tensor_file import OpenFiles, TensorEntry

if TYPE_CHECKING:
    import torch


class ShardWriter:
    """Writes the files of ``layout`` into ``folder``: an ``OutputFolder``'s ``path``, so that a failure leaves nothing.

    Headers are written at the start. Each tensor is then written once, from a tensor or by copying the bytes of a
    TensorEntry; ``finish()`` writes the index. A tensor written twice, of another dtype or shape, or left out is a
    programming error and asserts. Disk faults raise OSError, which the OutputFolder turns into a readable error.
    """

    def __init__(self, folder: Path, layout: ShardLayout) -> None:
        self.folder = folder
        self.layout = layout
        self._placed = layout.placed
        self._missing = set(self._placed)
        self._sources = OpenFiles()
        self._targets = OpenFiles(writable=True)
        for shard in layout.shards:
            fd = os.open(folder / shard.file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                os.truncate(fd, shard.nbytes)
                pwrite_all(fd, shard.header, 0)
            finally:
                os.close(fd)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write ``tensor`` under ``name``; its dtype and shape must be the planned ones. Gaps are closed up first."""
        from rlctl.keys.tensor_values import tensor_bytes

        placed = self._take(name)
        found = (dtype_code(tensor.dtype), tuple(tensor.shape))
        assert found == (placed.tensor.dtype, placed.tensor.shape), (placed.tensor, found)
        if placed.nbytes:
            pwrite_all(self._target(placed), tensor_bytes(tensor.detach().cpu().contiguous()), placed.offset)

    def write_pieces(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write tensor ``name`` from contiguous CPU pieces that fill it in order; each may reuse the last one's memory.

        Every piece must be of the planned dtype, and together they must be the planned bytes.
        """
        from rlctl.keys.tensor_values import tensor_bytes

        placed = self._take(name)
        done = 0
        for piece in pieces:
            assert dtype_code(piece.dtype) == placed.tensor.dtype, (placed.tensor, piece.dtype)
            data = tensor_bytes(piece)
            assert done + len(data) <= placed.nbytes, placed.tensor
            pwrite_all(self._target(placed), data, placed.offset + done)
            done += len(data)
        assert done == placed.nbytes, (placed.tensor, done)

    def copy(self, pairs: Iterable[tuple[str, TensorEntry]]) -> None:
        """Copy the bytes of each entry to the tensor of that name.

        Neighbours that stay neighbours go in one call: a shard whose order is unchanged is copied whole. Raises
        TensorFileError when a source ends early.
        """
        jobs = [(self._take(name), entry) for name, entry in pairs]
        for placed, entry in jobs:
            assert (placed.tensor.dtype, placed.tensor.shape) == (entry.dtype, entry.shape), placed.tensor.name
        for source, offset, placed, count in _runs(jobs):
            copy_range(
                self._sources.descriptor(source), offset, self._target(placed), placed.offset, count,
                where=f"{source}: tensor {placed.tensor.name!r}",
            )  # fmt: skip

    def copy_stretches(self, name: str, stretches: Iterable[tuple[TensorEntry, int, int, int]]) -> None:
        """Put a tensor together from (entry, first byte in the entry, first byte in the tensor, bytes) stretches.

        What no stretch covers stays zero. Raises TensorFileError when a source ends early.
        """
        placed = self._take(name)
        for entry, start, at, count in stretches:
            assert 0 <= at <= at + count <= placed.nbytes, name
            copy_range(
                self._sources.descriptor(entry.file), entry.offset + start, self._target(placed), placed.offset + at,
                count, where=f"{entry.file}: tensor {entry.name!r}",
            )  # fmt: skip

    def finish(self) -> None:
        """Write the index and close. Every planned tensor must have been written."""
        assert not self._missing, sorted(self._missing)[:3]
        if self.layout.index is not None:
            text = json.dumps(self.layout.index_content(), indent=2, ensure_ascii=False)
            (self.folder / self.layout.index).write_text(text + "\n", encoding="utf-8")
        self.close()

    def close(self) -> None:
        """Close every file. ``finish()`` does it; alone it leaves the output incomplete."""
        self._sources.close()
        self._targets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        self.close()

    def _target(self, placed: Placed) -> int:
        return self._targets.descriptor(self.folder / placed.file)

    def _take(self, name: str) -> Placed:
        assert name in self._missing, f"{name!r} is not planned, or was written already"
        self._missing.remove(name)
        return self._placed[name]


def _runs(jobs: list[tuple[Placed, TensorEntry]]) -> Iterable[tuple[Path, int, Placed, int]]:
    """Yield (source file, source offset, first place, bytes) of the longest stretches that copy in one piece."""
    jobs = sorted((j for j in jobs if j[0].nbytes), key=lambda j: (j[0].file, j[0].offset))
    start = 0
    for i in range(1, len(jobs) + 1):
        if i < len(jobs) and _continues(jobs[i - 1], jobs[i]):
            continue
        first, entry = jobs[start]
        last = jobs[i - 1][0]
        yield entry.file, entry.offset, first, last.offset + last.nbytes - first.offset
        start = i


def _continues(before: tuple[Placed, TensorEntry], after: tuple[Placed, TensorEntry]) -> bool:
    (place, entry), (next_place, next_entry) = before, after
    return (
        place.file == next_place.file
        and entry.file == next_entry.file
        and place.offset + place.nbytes == next_place.offset
        and entry.offset + entry.nbytes == next_entry.offset
    )
