"""Writing a ``torch.save`` file tensor by tensor, in any order, without ever holding the tensors together.

``torch.save`` itself writes the structure, with room for every tensor; the bytes are filled in afterwards and the
archive's checksums are set to match.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from rlctl.keys.byte_copy import pwrite_all
from rlctl.keys.dtypes import dtype_nbytes, torch_dtype
from rlctl.keys.layout import TensorInfo

_CHUNK = 8 << 20
_DIRECTORY_ENTRY = 46  # bytes of an entry of the zip's directory, without its name, extra field and comment
_RECORD_HEADER = 30  # bytes of a record's header, likewise


def write_structure(path: Path, tensors: Mapping[str, TensorInfo], extra: Mapping[str, Any]) -> dict[str, int]:
    """Make a file that ``torch.load(weights_only=True)`` reads as ``{"model": {name: zeros}, **extra}``.

    Returns name -> offset of the tensor's bytes in the file. Once they are written, call ``set_checksums``.

    Args:
        path: the file to make.
        tensors: name -> shape and dtype.
        extra: plain numbers and strings.
    """
    with FakeTensorMode():
        shells = {
            name: torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="cpu") for name, info in tensors.items()
        }
    with skip_data(materialize_fake_tensors=True):
        torch.save({"model": shells, **extra}, path)
    records = {key: (offset, size) for key, offset, size, _ in _records(path)}
    offsets = {}
    for index, (name, info) in enumerate(tensors.items()):
        offsets[name], size = records[str(index)]
        assert size == dtype_nbytes(info.dtype, shells[name].numel()), name
    return offsets


def set_checksums(path: Path) -> None:
    """Set the checksum of every tensor's record to that of the bytes which are there now."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _, offset, size, entry in _records(path):
            if size:
                checksum = _checksum(fd, offset, size).to_bytes(4, "little")
                pwrite_all(fd, checksum, offset + size + 4)  # in the descriptor behind the data
                pwrite_all(fd, checksum, entry + 16)
    finally:
        os.close(fd)


def _records(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield (number, offset of the bytes, bytes, offset of its directory entry) of every tensor's record."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        at = archive.start_dir
        for record in archive.infolist():
            head, _, key = record.filename.rpartition("/data/")
            if head and key.isdigit():
                stream.seek(record.header_offset)
                header = stream.read(_RECORD_HEADER)
                names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                yield key, record.header_offset + _RECORD_HEADER + names, record.file_size, at
            stream.seek(at)
            entry = stream.read(_DIRECTORY_ENTRY)
            assert entry[:4] == b"PK\x01\x02"
            at += _DIRECTORY_ENTRY + sum(int.from_bytes(entry[i : i + 2], "little") for i in (28, 30, 32))


def _checksum(fd: int, offset: int, size: int) -> int:
    buffer = memoryview(bytearray(min(size, _CHUNK)))
    value, done = 0, 0
    while done < size:
        count = os.preadv(fd, [buffer[: size - done]], offset + done)
        assert count, "the file was cut short while it was written"
        value = zlib.crc32(buffer[:count], value)
        done += count
    return value
