"""Where the records of an uncompressed zip archive lie, so that they can be read in place (torch.save's container)."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import NamedTuple

from rlctl.keys.tensor_file import TensorFileError, open_regular

_LOCAL_HEADER = struct.Struct("<4s22xHH")


class ZipRecord(NamedTuple):
    """Bytes of one record: absolute offset in the file, and length."""

    offset: int
    nbytes: int


def zip_records(path: Path, start: int = 0, length: int | None = None) -> dict[str, ZipRecord]:
    """Return name -> record of the archive in ``length`` bytes from ``start`` of the file (default: the whole file).

    Raises TensorFileError for anything but a sound archive of uncompressed records inside those bounds.
    """
    fd, size = open_regular(path)
    try:
        end = size if length is None else start + length
        if not 0 <= start <= end <= size:
            raise TensorFileError(f"bytes {start} to {end} lie outside its {size}", where=str(path))
        window = _Window(fd, start, end - start)
        try:
            with zipfile.ZipFile(window) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error, EOFError) as error:
            raise TensorFileError(
                "not a file that torch.save wrote, or a damaged one", where=str(path), fix=f"zip: {error}"
            ) from error
        return {member.filename: _record(window, member, path) for member in members}
    finally:
        os.close(fd)


def _record(window: _Window, member: zipfile.ZipInfo, path: Path) -> ZipRecord:
    where = f"{path}: record {member.filename!r:.200}"
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.compress_size != member.file_size:
        raise TensorFileError("is compressed or encrypted", where=where, fix="save it with torch.save's own format")
    if not 0 <= member.header_offset <= window.length - _LOCAL_HEADER.size:
        raise TensorFileError("lies outside the file", where=where)
    window.seek(member.header_offset)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
    begin = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if signature != b"PK\x03\x04" or begin + member.file_size > window.length:
        raise TensorFileError("lies outside the file", where=where)
    return ZipRecord(window.start + begin, member.file_size)


class _Window(io.RawIOBase):
    """A stretch of a file as a seekable file of its own."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self.fd, self.start, self.length = fd, start, length
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("a seek before the beginning")
        self.at = base + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        left = max(self.length - self.at, 0)
        found = os.pread(self.fd, left if size < 0 else min(size, left), self.start + self.at)
        self.at += len(found)
        return found
