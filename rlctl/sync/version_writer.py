"""Writing one sender's tensors of a version as safetensors files, while they come, one at a time.

A file's header stands before its data and names what is not known yet, so room is left for it: the format allows
blanks at its end. When the room is used up, a next file begins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from rlctl.keys.safetensors_header import build_header
from rlctl.sync.buckets import flat_bytes
from rlctl.sync.digest import PIECE, Bytes, Verify, bind, hasher
from rlctl.sync.errors import MismatchError, TransferError
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.sync.version_manifest import Part, ShardRecord, TensorRecord

HEADER_NBYTES = 256 << 10
# Of a tensor's entry, beside its name, at the most: dtype, 20 digits a size, two offsets, quotes and commas.
_ENTRY = 120

Put = Callable[[int, Bytes], None]


def write_piece(fd: int, piece: Bytes) -> None:
    """Write bytes at the file's position."""
    view = memoryview(piece.data)
    while len(view):
        view = view[os.write(fd, view) :]


class VersionWriter:
    """One sender's files of one version.

    Args:
        where: the folder, for errors.
        folder: the open folder; it stays the caller's.
        name: the version's.
        sender: rank.
        version: of the weights.
        base_version: version that the stream is a delta against, else None.
        verify: what is hashed.
        put: writes one piece (``write_piece``).
    """

    def __init__(
        self,
        where: Path,
        folder: int,
        name: str,
        sender: int,
        *,
        version: int,
        base_version: int | None,
        verify: Verify,
        put: Put = write_piece,
    ) -> None:
        self._where = where
        self._folder = folder
        self._name = name
        self._sender = sender
        self._version = version
        self._base_version = base_version
        self._verify: Verify = verify
        self._put = put
        self._shards: list[ShardRecord] = []
        self._records: list[TensorRecord] = []
        self._fd: int | None = None
        self._held: list[tuple[str, str, tuple[int, ...]]] = []
        self._room = 0
        self._data_nbytes = 0
        self.nbytes = 0

    @property
    def tensors(self) -> int:
        """Tensors written."""
        return len(self._records)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, hashing each piece while it is in the cache. Raises OSError, MismatchError."""
        meta = TensorMeta.of(name, tensor)
        room = len(json.dumps(name, ensure_ascii=False).encode()) + 21 * len(meta.shape) + _ENTRY
        if room > HEADER_NBYTES // 2:
            raise TransferError(f"the name of tensor {name:.80} is too long for a file")
        if self._fd is None or room > self._room:
            self._end_shard()
            self._begin_shard()
        assert self._fd is not None
        hashing = hasher(meta, self._verify, self._version)
        flat = _bytes_of(tensor)
        if len(flat) != meta.nbytes:
            raise MismatchError(
                f"tensor {name} has {len(flat)} bytes on this rank, and all of it takes {meta.nbytes}",
                fix="a partitioned parameter is gathered before it is sent",
            )
        for begin in range(0, len(flat), PIECE):
            piece = flat[begin : begin + PIECE]
            hashing.update(piece)
            self._put(self._fd, piece)
        self._room -= room
        self._held.append((name, meta.dtype, meta.shape))
        self._data_nbytes += meta.nbytes
        self.nbytes += meta.nbytes
        digest = bind(meta, hashing.content(), version=self._version, base_version=self._base_version)
        self._records.append(TensorRecord(name, meta.dtype, meta.shape, len(self._shards), digest.hex()))

    def end(self) -> Part:
        """Bring all to the disk, and return what was written. Raises OSError."""
        self._end_shard()
        return Part(self._name, self._sender, self._shards, self._records)

    def close(self) -> None:
        """Let go the file under way, if there is one."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _begin_shard(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._file(), flags, 0o600, dir_fd=self._folder)
        os.lseek(self._fd, HEADER_NBYTES, os.SEEK_SET)
        self._room, self._held, self._data_nbytes = HEADER_NBYTES - 256, [], 0

    def _end_shard(self) -> None:
        if self._fd is None:
            return
        text = build_header(self._held, {"version": str(self._version), "written_by": "rlctl"})[8:]
        assert len(text) <= HEADER_NBYTES - 8
        padded = text.ljust(HEADER_NBYTES - 8)
        os.pwrite(self._fd, len(padded).to_bytes(8, "little") + padded, 0)
        os.fsync(self._fd)
        self._shards.append(ShardRecord(self._file(), HEADER_NBYTES + self._data_nbytes))
        self.close()

    def _file(self) -> str:
        return f"shard-{self._sender}-{len(self._shards)}.safetensors"


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    flat = flat_bytes(tensor)
    if flat is None:
        flat = flat_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())
        assert flat is not None
    return flat
