"""Reading one version of weights out of its folder, straight into tensors, every byte checked."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Self

import torch

from rlctl.keys.dtypes import dtype_code, torch_dtype
from rlctl.keys.safetensors_header import HeaderError, parse_header
from rlctl.keys.tensor_file import TensorEntry
from rlctl.sync.buckets import flat_bytes
from rlctl.sync.digest import PIECE, Bytes, Verify, bind, hasher
from rlctl.sync.errors import CorruptedError
from rlctl.sync.protocols import LoadReport
from rlctl.sync.targets import matching
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.sync.version_manifest import FORMAT, Manifest, TensorRecord

_SHARD = re.compile(r"shard-\d+-\d+\.safetensors")
_MAX_HEADER = 100_000_000


class VersionReader:
    """One version, its files open: they can be read to the end whatever becomes of their names.

    Args:
        where: its folder, for errors.
        folder: the open folder; it is not needed afterwards.
        manifest: what it says of itself, its seal checked.

    Attributes:
        before_piece: called before each piece is read; what it raises ends the reading.
        skipped: names of tensors that are for others.

    Raises:
        CorruptedError: a file is missing, a link, cut short, or holds other tensors than the manifest says.
    """

    def __init__(self, where: Path, folder: int, manifest: Manifest) -> None:
        self.manifest = manifest
        self._where = where
        self.before_piece: Callable[[], None] = _nothing
        self.skipped: AbstractSet[str] = frozenset()
        self._fds: list[int] = []
        self._places: dict[str, TensorEntry] = {}
        if manifest.format != FORMAT:
            raise CorruptedError(f"it has format {manifest.format}, and this rlctl reads {FORMAT}")
        try:
            for number, shard in enumerate(manifest.shards):
                self._open_shard(folder, number, shard.file, shard.nbytes)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.manifest.version

    def require(self, version: int, base_version: int | None, verify: Verify) -> None:
        """Raise CorruptedError unless it is what a sync is to bring."""
        manifest = self.manifest
        if (manifest.version, manifest.base_version) != (version, base_version):
            raise CorruptedError(
                f"version {manifest.version} against base {manifest.base_version} arrived in the sync to version "
                f"{version} against base {base_version}"
            )
        if manifest.verify != verify:
            raise CorruptedError(
                f"the version was written with verify {manifest.verify}, and it is {verify} here",
                fix="sync.verify must be the same on both sides",
            )

    @property
    def records(self) -> list[TensorRecord]:
        """What is to be read, in the order it was written."""
        return [record for record in self.manifest.tensors if record.name not in self.skipped]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in the order they were written, each checked and in memory of its own.

        Raises CorruptedError.
        """
        for record in self.records:
            yield record.name, self._whole(record)

    def into(self, targets: Mapping[str, torch.Tensor], *, cast: bool = False) -> LoadReport:
        """Read each tensor right into the one of its name in ``targets``.

        Args:
            targets: name -> tensor of the same shape; written in place.
            cast: let a target have another dtype.

        Raises:
            CorruptedError: bytes are not what was written; targets may have been written in part.
            MismatchError: a shape differs, or a dtype does and ``cast`` is off.
        """
        loaded, unknown = list[str](), list[str]()
        for record in self.records:
            target = targets.get(record.name)
            if target is None:
                unknown.append(record.name)
                continue
            self.read(record, matching(record.meta, target, cast=cast))
            loaded.append(record.name)
        done = set(loaded)
        return LoadReport(loaded, unknown, [name for name in targets if name not in done])

    def read(self, record: TensorRecord, target: torch.Tensor) -> None:
        """Read one tensor into ``target``, of the same shape, cast to its dtype. Raises CorruptedError."""
        flat = flat_bytes(target) if dtype_code(target.dtype) == record.dtype else None
        if flat is None:
            target.copy_(self._whole(record))
        else:
            self._fill(record, flat)

    def close(self) -> None:
        """Close its files."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _whole(self, record: TensorRecord) -> torch.Tensor:
        memory = torch.empty(record.meta.nbytes, dtype=torch.uint8)
        self._fill(record, memory.numpy())
        return memory.view(torch_dtype(record.dtype)).view(record.shape)

    def _fill(self, record: TensorRecord, flat: Bytes) -> None:
        meta, entry = record.meta, self._places[record.name]
        hashing = hasher(meta, self.manifest.verify, self.version)
        for begin in range(0, entry.nbytes, PIECE):
            piece = flat[begin : begin + PIECE]
            self.before_piece()
            self._read_piece(self._fds[record.shard], entry.offset + begin, piece, record.name)
            hashing.update(piece)
        base = self.manifest.base_version
        if bind(meta, hashing.content(), version=self.version, base_version=base).hex() != record.digest:
            raise CorruptedError(
                f"tensor {record.name} is not as it was written: its digest differs", where=str(entry.file)
            )

    def _read_piece(self, fd: int, offset: int, piece: Bytes, name: str) -> None:
        view, done = memoryview(piece.data), 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if not count:
                raise CorruptedError(f"the file of tensor {name} ends before the tensor does", where=str(self._where))
            done += count

    def _open_shard(self, folder: int, number: int, name: str, nbytes: int) -> None:
        where = self._where / name
        if _SHARD.fullmatch(name) is None:
            raise CorruptedError(f"{name!r:.80} is no name of a file of weights", where=str(self._where))
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            reason = "is a link" if error.errno == errno.ELOOP else f"cannot be opened ({error.strerror})"
            raise CorruptedError(f"the file {reason}", where=str(where)) from error
        self._fds.append(fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
            raise CorruptedError(f"the file has {found.st_size} bytes, and {nbytes} were written", where=str(where))
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if length > min(nbytes - 8, _MAX_HEADER):
            raise CorruptedError(f"its header would have {length} bytes", where=str(where))
        try:
            entries = parse_header(os.pread(fd, length, 8), path=where, file_size=nbytes).entries
        except HeaderError as error:
            raise CorruptedError(error.message, where=error.where) from error
        held = {e.name: TensorMeta(e.name, e.dtype, e.shape) for e in entries}
        due = {r.name: r.meta for r in self.manifest.tensors if r.shard == number}
        if held != due:
            odd = next(iter(sorted({k for k in held.keys() | due.keys() if held.get(k) != due.get(k)})))
            raise CorruptedError(f"tensor {odd} is not there as the manifest says", where=str(where))
        self._places.update((e.name, e) for e in entries)


def _nothing() -> None:
    pass
