"""Where every stored tensor of a checkpoint lies, whatever its files: one stretch of a file, or pieces in many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlctl.keys.boxes import Box, Shape, Span, extent, first_offset, intersect, run_length, volume, whole
from rlctl.keys.dtypes import dtype_nbytes
from rlctl.keys.layout import Ref, TensorInfo
from rlctl.keys.tensor_file import OpenFiles, TensorEntry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Extent:
    """A stretch of a file and the region of the tensor whose elements it holds, in row-major order."""

    box: Box
    entry: TensorEntry


class StoredTensors:
    """Reads regions of the tensors of one checkpoint.

    Args:
        extents: for each tensor the pieces that it lies in; together they cover it, and they do not overlap.
        shapes: whole shape of those tensors that lie in more than one piece.
    """

    def __init__(self, extents: Mapping[Ref, tuple[Extent, ...]], shapes: Mapping[Ref, Shape] | None = None) -> None:
        self._extents = dict(extents)
        self.infos: dict[Ref, TensorInfo] = {}
        for ref, pieces in self._extents.items():
            shape = (shapes or {}).get(ref, pieces[0].entry.shape)
            self.infos[ref] = TensorInfo(shape, pieces[0].entry.dtype)
        self._files = OpenFiles()

    @classmethod
    def of_entries(cls, entries: Mapping[Ref, TensorEntry]) -> StoredTensors:
        """Return the tensors that each lie in one stretch."""
        return cls({ref: (Extent(whole(entry.shape), entry),) for ref, entry in entries.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(dtype_nbytes(info.dtype, volume(whole(info.shape))) for info in self.infos.values())

    def entry(self, ref: Ref) -> TensorEntry | None:
        """Return the one stretch that holds all of a tensor, or None when it lies in pieces."""
        first, *more = self._extents[ref]
        return first.entry if not more and first.entry.shape == self.infos[ref].shape else None

    def files(self) -> list[Path]:
        """Return every file that holds a tensor, each once, in order."""
        return list(dict.fromkeys(piece.entry.file for pieces in self._extents.values() for piece in pieces))

    def read(self, ref: Ref, box: Box) -> torch.Tensor:
        """Return the region ``box`` of a tensor in fresh memory. Raises TensorFileError."""
        import torch

        from rlctl.keys.dtypes import torch_dtype

        outer = tuple(Span(span.start, span.stop - span.start) for span in box)
        out = torch.empty(extent(outer), dtype=torch_dtype(self.infos[ref].dtype))
        if out.numel():
            for piece in self._extents[ref]:
                shared = intersect(outer, piece.box)
                if shared is not None:
                    self._read_piece(piece, shared, outer, out)
        return out[tuple(slice(None, None, span.step) for span in box)]

    def _read_piece(self, piece: Extent, shared: Box, outer: Box, out: torch.Tensor) -> None:
        """Read ``shared`` of a piece into its place in ``out``, which is the region ``outer`` of the tensor."""
        import torch

        from rlctl.keys.tensor_values import tensor_bytes

        if shared == outer:
            self._read_runs(piece, shared, tensor_bytes(out))
            return
        part = torch.empty(extent(shared), dtype=out.dtype)
        self._read_runs(piece, shared, tensor_bytes(part))
        out[tuple(span.slice for span in _inside(shared, outer))] = part

    def _read_runs(self, piece: Extent, box: Box, buffer: memoryview) -> None:
        entry = piece.entry
        local = _inside(box, piece.box)
        run = run_length(local, entry.shape)
        size = dtype_nbytes(entry.dtype, run)
        for index, start in enumerate(_run_starts(local, entry.shape, run)):
            at = dtype_nbytes(entry.dtype, start)
            self._files.read_into(entry, buffer[index * size : (index + 1) * size], at)

    def close(self) -> None:
        """Close the files; reading again opens them again."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _inside(box: Box, outer: Box) -> Box:
    """Return ``box`` in the coordinates of ``outer``, which holds it."""
    return tuple(Span(a.start - b.start, a.size) for a, b in zip(box, outer, strict=True))


def _run_starts(box: Box, shape: Shape, run: int) -> Iterator[int]:
    """Yield the element offsets of the stretches of ``run`` elements that make up ``box``, in row-major order."""
    inner, split = 1, len(box)
    while split and inner < run:
        split -= 1
        inner *= box[split].size
    starts = [first_offset(box, shape)]
    stride = 1
    strides = []
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    strides.reverse()
    for axis in range(split):
        starts = [start + i * strides[axis] for start in starts for i in range(box[axis].size)]
    yield from starts
