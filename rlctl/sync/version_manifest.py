"""What a folder of weights says of one version: its tensors, files, digests, and who vouches for them."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from rlctl.sync.delta import MARK
from rlctl.sync.digest import SyncDigest, Verify
from rlctl.sync.errors import CorruptedError
from rlctl.sync.tensor_meta import Size, SyncSummary, TensorMeta

FORMAT = 1


class ForeignError(CorruptedError):
    """It was written by another run, or by somebody who does not know the run's token."""


class TensorRecord(msgspec.Struct, frozen=True):
    """One tensor: ``shard`` is its file's place in the manifest's list, ``digest`` its bytes' (hex; empty when nothing
    was hashed)."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    shard: Size
    digest: str

    @property
    def meta(self) -> TensorMeta:
        """The tensor without its bytes."""
        return TensorMeta(self.name, self.dtype, self.shape)


class ShardRecord(msgspec.Struct, frozen=True):
    """One safetensors file and its size in bytes."""

    file: str
    nbytes: Size


class Part(msgspec.Struct, frozen=True):
    """What one sender wrote into ``folder``: the name of one that is under way."""

    folder: str
    sender: Size
    shards: list[ShardRecord]
    tensors: list[TensorRecord]


class Manifest(msgspec.Struct, frozen=True):
    """One version, all of it. ``folder`` is the name of its folder, so that a manifest holds nowhere else."""

    format: int
    folder: str
    version: int
    base_version: int | None
    verify: Verify
    nbytes: Size
    digest: str
    shards: list[ShardRecord]
    tensors: list[TensorRecord]

    @property
    def changes(self) -> bool:
        """Whether some tensors are there as changes against ``base_version``."""
        return any(tensor.name.endswith(MARK) for tensor in self.tensors)

    def summary(self) -> SyncSummary:
        """Return what other transports send at the end of a sync."""
        return SyncSummary(
            self.version, self.base_version, len(self.tensors), self.nbytes, self.verify, bytes.fromhex(self.digest)
        )


class _Sealed(msgspec.Struct, frozen=True):
    mac: str
    content: msgspec.Raw


T = TypeVar("T", Part, Manifest)


def merged(parts: Sequence[Part], folder: str, *, version: int, base_version: int | None, verify: Verify) -> Manifest:
    """Return the manifest of what all senders wrote, to be in ``folder``. Raises CorruptedError when a tensor is in
    two parts."""
    total = SyncDigest(version, base_version)
    shards, tensors = list[ShardRecord](), list[TensorRecord]()
    for part in parts:
        tensors += [msgspec.structs.replace(t, shard=t.shard + len(shards)) for t in part.tensors]
        shards += part.shards
    for tensor in tensors:
        total.add(tensor.meta, bytes.fromhex(tensor.digest))
    return Manifest(
        FORMAT,
        folder,
        version,
        base_version,
        verify,
        total.nbytes,
        total.digest().hex(),
        shards,
        tensors,
    )


def sealed(document: Part | Manifest, token: str) -> bytes:
    """Return ``document`` as JSON under a message authentication code that only who knows the token can make."""
    content = msgspec.json.encode(document)
    return msgspec.json.encode(_Sealed(_mac(type(document), content, token), msgspec.Raw(content))) + b"\n"


def unsealed(data: bytes, kind: type[T], token: str) -> T:
    """Return the document in ``data``. Raises CorruptedError: it is unreadable, or its maker did not know the token."""
    try:
        outer = msgspec.json.decode(data, type=_Sealed)
        content = bytes(outer.content)
        if not hmac.compare_digest(outer.mac, _mac(kind, content, token)):
            raise ForeignError("it was not written by this run", fix="is the run's token the same?")
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:  # TypeError: a mac that is not ASCII
        raise CorruptedError(f"it cannot be read: {error}") from error


def _mac(kind: type, content: bytes, token: str) -> str:
    return hmac.digest(token.encode(), kind.__name__.encode() + b"\0" + content, "sha256").hex()
