"""The header of a safetensors file: parsed with every field distrusted, and written padded and in file order.

Format: https://github.com/huggingface/safetensors#format; the bounds are those of its reference implementation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from rlctl.keys.dtypes import DTYPE_BITS, dtype_nbytes
from rlctl.keys.json_file import JsonError, parse_object
from rlctl.keys.tensor_file import TensorEntry, TensorFileError, open_regular, pread_into

MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 64
MAX_ELEMENTS = 1 << 62
ALIGNMENT = 8


class HeaderError(TensorFileError):
    """The header of a safetensors file is not valid."""


@dataclass(frozen=True)
class Header:
    """A parsed header.

    Attributes:
        entries: the tensors in the order of their bytes.
        metadata: the free strings under ``__metadata__``.
        data_start: offset of the first data byte in the file.
    """

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    data_start: int = 0


def read_header(path: Path) -> Header:
    """Return the header of the safetensors file ``path``; the data is not touched.

    Raises HeaderError (damaged or hostile content) or TensorFileError (cannot be read), naming file and tensor.
    """
    fd, size = open_regular(path)
    try:
        if size < 8:
            raise HeaderError(f"only {size} bytes long, not a safetensors file", where=str(path))
        prefix = bytearray(8)
        pread_into(fd, 0, memoryview(prefix), where=str(path))
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise HeaderError(f"header length {length} is over the limit of {MAX_HEADER_BYTES}", where=str(path))
        if length > size - 8:
            raise HeaderError(f"header of {length} bytes in a file of {size}", where=str(path), fix="truncated file?")
        text = bytearray(length)
        pread_into(fd, 8, memoryview(text), where=str(path))
    finally:
        os.close(fd)
    return parse_header(text, path=path, file_size=size)


def parse_header(text: bytes | bytearray, *, path: Path, file_size: int) -> Header:
    """Return the header whose JSON text (without the length prefix) is ``text``, of a file of ``file_size`` bytes."""
    if text[:1] != b"{":
        raise HeaderError("the header does not begin with '{'", where=str(path), fix="not a safetensors file?")
    try:
        parsed = parse_object(text, where=str(path))
    except JsonError as error:
        raise HeaderError(f"unusable header: {error.message}", where=str(path)) from error
    metadata = _metadata(parsed.pop("__metadata__", None), path)
    start = 8 + len(text)
    entries = [_entry(name, info, path, start) for name, info in parsed.items()]
    entries.sort(key=lambda e: (e.offset, e.offset + e.nbytes))
    _check_cover(entries, start, file_size, path)
    return Header(tuple(entries), metadata, start)


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return length prefix and JSON of a header for ``(name, dtype, shape)`` laid out one after the other.

    Padded with spaces, so that the data begins at a multiple of 8. Raises HeaderError when it would be too long.
    """
    record: dict[str, Any] = {}
    if metadata:
        record["__metadata__"] = dict(metadata)
    offset = 0
    for name, dtype, shape in tensors:
        assert name != "__metadata__" and name not in record, name
        end = offset + tensor_nbytes(dtype, shape)
        record[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise HeaderError(
            f"a header of {len(text)} bytes is over the limit of {MAX_HEADER_BYTES}", fix="use more shards"
        )
    return len(text).to_bytes(8, "little") + text


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. Raises ValueError for an absurd size or packed elements in a broken byte."""
    elements, bound = 1, 1
    for size in shape:
        elements *= size
        bound *= max(size, 1)
        if bound > MAX_ELEMENTS:
            raise ValueError(f"shape {list(shape)} has more than 2^62 elements")
    return dtype_nbytes(dtype, elements)


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise HeaderError("__metadata__ must map strings to strings", where=str(path))
    return value


def _entry(name: str, info: Any, path: Path, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name!r:.200}"
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise HeaderError("the name is not valid Unicode", where=where) from error
    if not isinstance(info, dict):
        raise HeaderError("its description is not an object", where=where)
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HeaderError(f"unknown dtype {dtype!r:.80}", where=where, fix=f"known: {', '.join(DTYPE_BITS)}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise HeaderError(f"shape {shape!r:.80} is not a list of at most {MAX_DIMS} sizes", where=where)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise HeaderError(f"data_offsets {offsets!r:.80} is not [begin, end]", where=where)
    dims = tuple(shape)
    try:
        nbytes = tensor_nbytes(dtype, dims)
    except ValueError as error:
        raise HeaderError(str(error), where=where) from error
    if offsets[1] - offsets[0] != nbytes:
        raise HeaderError(
            f"{dtype} {list(dims)} takes {nbytes} bytes, its offsets span {offsets[1] - offsets[0]}", where=where
        )
    return TensorEntry(name, dtype, dims, path, data_start + offsets[0], nbytes)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    # type() and not isinstance(): true and false are no sizes
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_cover(entries: list[TensorEntry], start: int, file_size: int, path: Path) -> None:
    position = start
    for entry in entries:
        if entry.offset != position:
            fault = "overlaps the tensor before it" if entry.offset < position else "follows a hole in the data"
            raise HeaderError(
                f"at data offset {entry.offset - start} it {fault}", where=f"{path}: tensor {entry.name!r}"
            )
        position += entry.nbytes
        if position > file_size:
            raise HeaderError(
                f"ends at byte {position} of a file of {file_size}",
                where=f"{path}: tensor {entry.name!r}",
                fix="the file is truncated; copy or download it again",
            )
    if position != file_size:
        raise HeaderError(f"{file_size - position} bytes after the last tensor belong to none", where=str(path))
