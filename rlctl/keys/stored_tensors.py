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
from rlctl.keys.pieces import Piece, PiecedTensor
from rlctl.keys.stored_tensor import StoredTensor, read_stored
from rlctl.keys.tensor_file import OpenFiles, TensorEntry, TensorFileError
from rlctl.keys.torch_file import single_tensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Extent:
    """A region of a tensor and what holds its elements: a stretch of a file, or a piece that torch.save wrote."""

    box: Box
    held: TensorEntry | Piece

    @property
    def file(self) -> Path:
        """The file it lies in."""
        return self.held.file


class StoredTensors:
    """Reads regions of the tensors of one checkpoint.

    Args:
        extents: for each tensor the pieces that it lies in; together they cover it, and they do not overlap.
        infos: shape and dtype of each.
    """

    def __init__(self, extents: Mapping[Ref, tuple[Extent, ...]], infos: Mapping[Ref, TensorInfo]) -> None:
        self._extents = dict(extents)
        self.infos = dict(infos)
        self._resolved: dict[Piece, TensorEntry | StoredTensor] = {}
        self._files = OpenFiles()

    @classmethod
    def of(cls, tensors: Mapping[Ref, TensorEntry | PiecedTensor]) -> StoredTensors:
        """Return the tensors of an open checkpoint under names of the caller's."""
        extents: dict[Ref, tuple[Extent, ...]] = {}
        for ref, tensor in tensors.items():
            if isinstance(tensor, TensorEntry):
                extents[ref] = (Extent(whole(tensor.shape), tensor),)
            else:
                extents[ref] = tuple(Extent(piece.box, piece) for piece in tensor.pieces)
        return cls(extents, {ref: TensorInfo(tensor.shape, tensor.dtype) for ref, tensor in tensors.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(dtype_nbytes(info.dtype, volume(whole(info.shape))) for info in self.infos.values())

    def entry(self, ref: Ref) -> TensorEntry | None:
        """Return the one stretch of a file that holds all of a tensor, or None when it lies in pieces."""
        extents = self._extents[ref]
        if len(extents) != 1 or extents[0].box != whole(self.infos[ref].shape):
            return None
        held = self._held(ref, extents[0])
        return held if isinstance(held, TensorEntry) else None

    def files(self) -> list[Path]:
        """Return every file that holds a tensor, each once, in order."""
        return list(dict.fromkeys(one.file for extents in self._extents.values() for one in extents))

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
                    self._read_piece(ref, piece, shared, outer, out)
        return out[tuple(slice(None, None, span.step) for span in box)]

    def fill(self, ref: Ref, out: torch.Tensor, first: int = 0) -> None:
        """Fill ``out`` with the elements of a tensor that has an ``entry``, from index ``first`` on in row-major order.

        Raises TensorFileError.
        """
        from rlctl.keys.tensor_values import tensor_bytes

        entry = self.entry(ref)
        assert entry is not None, ref
        self._files.read_into(entry, tensor_bytes(out), first * out.element_size())

    def pieces(self, ref: Ref) -> Iterator[torch.Tensor] | None:
        """Return runs of a tensor that fill it in order, where it is made rather than read; each is valid until the
        next. None for a tensor that lies in files."""
        assert ref in self.infos
        return None

    def _read_piece(self, ref: Ref, extent_: Extent, shared: Box, outer: Box, out: torch.Tensor) -> None:
        """Read ``shared`` of a piece into its place in ``out``, which is the region ``outer`` of the tensor."""
        import torch

        from rlctl.keys.tensor_values import tensor_bytes

        held = self._held(ref, extent_)
        local = _inside(shared, extent_.box)
        if isinstance(held, TensorEntry):
            direct = shared == outer
            part = out if direct else torch.empty(extent(shared), dtype=out.dtype)
            self._read_runs(held, local, tensor_bytes(part))
            if direct:
                return
        else:
            part = read_stored(self._files, str(ref), held)[tuple(span.slice for span in local)]
        out[tuple(span.slice for span in _inside(shared, outer))] = part

    def _read_runs(self, entry: TensorEntry, local: Box, buffer: memoryview) -> None:
        run = run_length(local, entry.shape)
        size = dtype_nbytes(entry.dtype, run)
        for index, start in enumerate(_run_starts(local, entry.shape, run)):
            at = dtype_nbytes(entry.dtype, start)
            self._files.read_into(entry, buffer[index * size : (index + 1) * size], at)

    def _held(self, ref: Ref, one: Extent) -> TensorEntry | StoredTensor:
        held = one.held
        if isinstance(held, TensorEntry):
            return held
        if held not in self._resolved:
            stored = held.stored or single_tensor(held.file, held.offset, held.length)
            info = self.infos[ref]
            if (stored.dtype, stored.shape) != (info.dtype, extent(one.box)):
                raise TensorFileError(
                    f"a piece is {stored.dtype} {list(stored.shape)}, not {info.dtype} {list(extent(one.box))}",
                    where=f"{held.file}: tensor {ref}",
                )
            self._resolved[held] = stored.entry(ref.name) if stored.contiguous else stored
        return self._resolved[held]

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
