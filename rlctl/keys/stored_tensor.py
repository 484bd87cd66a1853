"""A tensor as it lies in some file, with strides of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.keys.dtypes import DTYPE_BITS
from rlctl.keys.tensor_file import OpenFiles, TensorEntry

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``offset`` is that of its first element, ``stride`` counts elements."""

    dtype: str
    shape: Shape
    stride: Shape
    file: Path
    offset: int

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie side by side in row-major order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and step != expected:
                return False
            expected *= max(size, 1)
        return True

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * DTYPE_BITS[self.dtype] // 8

    def entry(self, name: str) -> TensorEntry:
        """Return it as a TensorEntry; it must be contiguous."""
        assert self.contiguous
        return TensorEntry(name, self.dtype, self.shape, self.file, self.offset, self.span)


def read_stored(files: OpenFiles, name: str, stored: StoredTensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor, contiguous, in ``out`` or fresh memory. Raises TensorFileError naming file and tensor."""

    from rlctl.keys.tensor_values import read_tensor

    if stored.contiguous:
        return read_tensor(files, stored.entry(name), out)
    width = DTYPE_BITS[stored.dtype] // 8
    flat = TensorEntry(name, stored.dtype, (stored.span // width,), stored.file, stored.offset, stored.span)
    strided = read_tensor(files, flat).as_strided(stored.shape, stored.stride)
    return strided.contiguous() if out is None else out.copy_(strided)
