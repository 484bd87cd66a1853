"""Columns as the bytes of a safetensors file.

The library's own ``save`` copies every column twice and costs three times as much for columns as small as those of a
step. Its readers read these.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np

from rlctl.experience.records.columns import Columns

_NAMES = {
    np.dtype(np.float64): "F64", np.dtype(np.float32): "F32", np.dtype(np.int64): "I64", np.dtype(np.int32): "I32",
    np.dtype(np.uint8): "U8", np.dtype(np.bool_): "BOOL",
}  # fmt: skip


def encode(columns: Columns) -> bytes:
    """Return a safetensors file of ``columns``, which are contiguous: the length of its header as a little-endian
    uint64, the header, and the bytes of each, the widest numbers first so that all are aligned."""
    header, parts, end = {}, [], 0
    for name, column in sorted(columns.items(), key=lambda item: -item[1].itemsize):
        begin, end = end, end + column.nbytes
        header[name] = {"dtype": _NAMES[column.dtype], "shape": column.shape, "data_offsets": (begin, end)}
        parts.append(column.data)
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % 8)
    return b"".join([struct.pack("<Q", len(head)), head, *parts])
