"""Tensors that lie in pieces over several files: whether they are whole, and how they are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlctl.errors import Finding, UsageError
from rlctl.keys.boxes import Box, Shape, extent, fits, intersect, volume
from rlctl.keys.checkpoint import CheckpointError
from rlctl.keys.dtypes import DTYPE_BITS
from rlctl.keys.stored_tensor import StoredTensor, read_stored
from rlctl.keys.tensor_file import OpenFiles, TensorFileError
from rlctl.keys.torch_file import single_tensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Piece:
    """A region of a tensor and where its data lies: as a StoredTensor, or as bytes of a file that torch.save wrote."""

    box: Box
    file: Path
    stored: StoredTensor | None = None
    offset: int = 0
    length: int = 0


@dataclass(frozen=True)
class PiecedTensor:
    """A whole tensor as pieces in several files."""

    name: str
    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def check_pieces(name: str, shape: Shape, boxes: Sequence[Box], *, where: str) -> None:
    """Raise TensorFileError unless ``boxes`` fill a tensor of ``shape`` exactly: inside it, no overlap, no hole."""
    place = f"{where}: tensor {name!r:.200}"
    for box in boxes:
        if not fits(box, shape):
            raise TensorFileError(f"a piece lies outside its shape {list(shape)}", where=place)
    held = sum(volume(box) for box in boxes)
    if held != prod(shape):
        missing = "is missing" if held < prod(shape) else "is there twice"
        raise TensorFileError(f"its pieces hold {held} of {prod(shape)} elements: a part {missing}", where=place)
    live: list[Box] = []
    for box in sorted((b for b in boxes if volume(b)), key=lambda b: b[0].start if b else 0):
        live = [other for other in live if other and other[0].stop > box[0].start] if box else []
        if any(intersect(box, other) for other in live):
            raise TensorFileError("two of its pieces overlap", where=place)
        live.append(box)


def locate(tensor: PiecedTensor) -> list[tuple[Box, StoredTensor]]:
    """Return (region, where its data lies) of every piece. For a DCP folder this opens each piece's small archive.

    Raises TensorFileError for a piece that is damaged or other than the checkpoint says.
    """
    found = []
    for piece in tensor.pieces:
        stored = piece.stored or single_tensor(piece.file, piece.offset, piece.length)
        if (stored.dtype, stored.shape) != (tensor.dtype, extent(piece.box)):
            raise TensorFileError(
                f"a piece is {stored.dtype} {list(stored.shape)}, not {tensor.dtype} {list(extent(piece.box))}",
                where=f"{piece.file}: tensor {tensor.name!r:.200}",
            )
        found.append((piece.box, stored))
    return found


def read_pieces(files: OpenFiles, tensor: PiecedTensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the whole tensor, assembled piece by piece in ``out`` or fresh memory.

    A piece that is one stretch of the whole is read straight into place; another one passes through memory of its own
    size. Raises TensorFileError naming file and tensor, UsageError when ``out`` has another dtype or shape.
    """
    import torch

    from rlctl.keys.dtypes import torch_dtype

    located = locate(tensor)
    dtype = torch_dtype(tensor.dtype)
    whole = torch.empty(tensor.shape, dtype=dtype) if out is None else out
    if whole.dtype != dtype or whole.shape != tensor.shape or not whole.is_contiguous():
        raise UsageError(f"tensor {tensor.name!r} is {tensor.dtype} {tensor.shape}, not {whole.dtype} {whole.shape}")
    for box, stored in located:
        target = whole[tuple(span.slice for span in box)]
        if target.is_contiguous():
            read_stored(files, tensor.name, stored, target)
        elif target.numel():
            target.copy_(read_stored(files, tensor.name, stored))
    return whole


@dataclass
class PiecedCheckpoint:
    """An open checkpoint whose tensors lie in pieces: a DCP folder, per-rank files, or one file of torch.save.

    Attributes:
        path: the folder or file.
        kind: ``"dcp"``, ``"rank-files"`` or ``"torch-file"``.
        entries: name -> PiecedTensor.
        objects: names of values that are no tensors; they are never read.
        findings: every fault found; ``check()`` raises them.
    """

    path: Path
    kind: str
    entries: dict[str, PiecedTensor] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    _open: OpenFiles = field(default_factory=OpenFiles)

    def check(self) -> None:
        """Raise CheckpointError when a piece is missing, doubled or out of place."""
        if self.findings:
            raise CheckpointError(f"{self.path}: damaged checkpoint", self.findings)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def add(self, tensor: PiecedTensor) -> None:
        """Add a tensor; one whose pieces do not make it whole becomes a finding."""
        self.entries[tensor.name] = tensor
        try:
            check_pieces(tensor.name, tensor.shape, [p.box for p in tensor.pieces], where=str(self.path))
        except TensorFileError as error:
            self.findings.append(Finding(error.message, error.where, error.fix))

    def tensor(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole tensor ``name``, read into ``out`` (same dtype and shape, contiguous) or fresh memory."""
        return read_pieces(self._open, self.entries[name], out)

    def close(self) -> None:
        """Close the files; reading again opens them again."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
