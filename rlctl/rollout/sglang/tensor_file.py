"""A safetensors file that is written as its tensors arrive, in any order, some of them perhaps never."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from rlctl.keys.dtypes import dtype_code
from rlctl.keys.safetensors_header import ALIGNMENT
from rlctl.sync.buckets import flat_bytes

# Of an entry of the header beside its name: dtype, sizes, two offsets.
_ENTRY_BYTES = 160


class TensorFile:
    """One file, whose header is written last into room that was kept for it.

    Args:
        path: of the file; its folder is made, readable for its owner alone.
        shapes: name -> shape of all that may come.
        dtype: what they are cast to; None leaves them as they are.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None) -> None:
        path.parent.mkdir(mode=0o700)
        room = sum(len(json.dumps(name)) + _ENTRY_BYTES + 12 * len(shape) for name, shape in shapes.items())
        self._room = room + -room % ALIGNMENT + ALIGNMENT
        self._dtype = dtype
        self._entries: dict[str, Any] = {}
        self._end = 0
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._file.seek(8 + self._room)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, of any device; it may be changed afterwards."""
        assert name not in self._entries, name
        plain = tensor.detach().to("cpu", self._dtype).contiguous()
        data = flat_bytes(plain)
        assert data is not None
        self._file.write(data.data)
        end = self._end + plain.nbytes
        offsets, self._end = [self._end, end], end
        self._entries[name] = {"dtype": dtype_code(plain.dtype), "shape": list(plain.shape), "data_offsets": offsets}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Write the header, and close the file."""
        with self._file:
            header = json.dumps(self._entries).encode()
            assert len(header) <= self._room
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
