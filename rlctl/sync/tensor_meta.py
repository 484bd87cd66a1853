"""What travels beside the bytes: which tensor, which part of it, where in the bucket.

Tensors go as bytes, never as dtypes: they are cut and merged as uint8. Every offset in a bucket is a multiple of 256,
so that each tensor can be viewed in its own dtype where it lies, whatever came before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Annotated

import msgspec

from rlctl.errors import Finding, FindingsError
from rlctl.keys.dtypes import DTYPE_BITS, dtype_code, dtype_nbytes
from rlctl.sync.errors import CorruptedError, MismatchError

if TYPE_CHECKING:
    import torch

ALIGN = 256

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """A tensor without its bytes: name, safetensors dtype code (``"BF16"``) and full shape."""

    name: str
    dtype: str
    shape: tuple[Size, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorMeta:
        """Return the meta of a torch tensor. A partitioned parameter that reports no elements of its own (DeepSpeed
        ZeRO-3: ``ds_shape``) is sized by its full shape; a DTensor's shape is the full one already."""
        return cls(name, dtype_code(tensor.dtype), tuple(getattr(tensor, "ds_shape", tensor.shape)))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return _nbytes(self.dtype, self.shape)


@lru_cache(maxsize=1 << 16)  # asked several times for each piece
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return dtype_nbytes(dtype, prod(shape))


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Bytes ``[start, start + nbytes)`` of a tensor, at ``offset`` of a bucket.

    ``digest`` is that of the whole tensor, in the chunk that ends it; empty before that, or when nothing is verified.
    """

    tensor: TensorMeta
    start: Size
    nbytes: Size
    offset: Size
    digest: bytes = b""

    @property
    def ends(self) -> bool:
        """Whether this chunk is the tensor's last."""
        return self.start + self.nbytes == self.tensor.nbytes

    @property
    def whole(self) -> bool:
        """Whether this chunk is all of the tensor."""
        return self.nbytes == self.tensor.nbytes


class SyncSummary(msgspec.Struct, frozen=True, array_like=True):
    """What a sync was, all of it: rides with the last bucket."""

    version: int
    base_version: int | None
    tensors: Size
    nbytes: Size
    verify: str
    digest: bytes


class BucketMeta(msgspec.Struct, frozen=True, array_like=True):
    """One bucket: its place in the sync (from 0), the bytes in use, what they are; ``summary`` in the last one."""

    index: Size
    version: int
    used: Size
    chunks: tuple[Chunk, ...]
    summary: SyncSummary | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What no other bucket of a sync begins with, and this one does in every sync that is cut alike."""
        return (self.chunks[0].tensor.name, self.chunks[0].start) if self.chunks else ("", 0)

    def encode(self) -> bytes:
        """Return the msgpack form."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> BucketMeta:
        """Return the meta that ``encode`` wrote, with every bound checked. Raises CorruptedError.

        What is in a bucket of unchanged tensors reads the same in every sync, if nothing is verified: then it is the
        same ``chunks`` object as last time.
        """
        try:
            told = _DECODER.decode(data)
            chunks = _checked(told.chunks, told.used)
        except msgspec.DecodeError as error:
            raise CorruptedError(f"the description of a bucket cannot be read: {error}") from error
        return cls(told.index, told.version, told.used, chunks, told.summary)


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """A BucketMeta whose chunks are not decoded yet."""

    index: Size
    version: int
    used: Size
    chunks: msgspec.Raw
    summary: SyncSummary | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Told)
_CHUNKS = msgspec.msgpack.Decoder(tuple[Chunk, ...])
# Descriptions that are kept, (encoded, used) -> chunks, and bytes of all together; decoded they take five times that.
_KEPT: dict[tuple[bytes, int], tuple[Chunk, ...]] = {}
_KEPT_NBYTES = 2 << 20
_KEEPING = threading.Lock()


def _checked(encoded: msgspec.Raw, used: int) -> tuple[Chunk, ...]:
    key = bytes(encoded), used
    found = _KEPT.get(key)
    if found is None:
        found = _CHUNKS.decode(key[0])
        for chunk in found:
            check_chunk(chunk, used)
        if not any(chunk.digest for chunk in found):  # else no later one is equal
            return _kept(key, found)
    return found


def _kept(key: tuple[bytes, int], chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """Keep a description; return what was kept of it by another thread meanwhile, or ``chunks``."""
    with _KEEPING:
        if key in _KEPT:
            return _KEPT[key]
        room = _KEPT_NBYTES - len(key[0]) - sum(len(encoded) for encoded, _ in _KEPT)
        while room < 0 and _KEPT:
            oldest = next(iter(_KEPT))
            room += len(oldest[0])
            del _KEPT[oldest]
        if room >= 0:
            _KEPT[key] = chunks
    return chunks


def check_chunk(chunk: Chunk, used: int) -> None:
    tensor = chunk.tensor
    bits = DTYPE_BITS.get(tensor.dtype)
    if bits is None or bits * prod(tensor.shape) % 8:
        raise CorruptedError(f"tensor {tensor.name!r:.80} has an impossible dtype {tensor.dtype!r:.20}")
    if (
        chunk.offset % ALIGN
        or chunk.offset + chunk.nbytes > used
        or chunk.start % ALIGN
        or chunk.start + chunk.nbytes > tensor.nbytes
    ):
        raise CorruptedError(f"a piece of tensor {tensor.name!r:.80} lies outside its bucket or its tensor")


def require_same_dtype(sent: TensorMeta, target_dtype: str) -> None:
    """Raise MismatchError unless the target holds the dtype that was sent: bytes are never reinterpreted."""
    if sent.dtype != target_dtype:
        raise MismatchError(
            f"tensor {sent.name} is sent as {sent.dtype}, and the engine holds {target_dtype}",
            fix="cast it where it is sent, or ask for a cast where it is loaded",
        )


def preflight(
    sent: Iterable[TensorMeta], targets: Mapping[str, TensorMeta], *, cast: bool = False, partial: bool = False
) -> None:
    """Compare what will be sent with what the engine holds, before anything is.

    Args:
        sent: every tensor of the stream.
        targets: the engine's tensors by name.
        cast: dtypes may differ, since the receiver casts.
        partial: the stream may leave tensors of the engine untouched.

    Raises:
        FindingsError: each unknown name, untouched name, shape and dtype that differs, at once.
    """
    findings: list[Finding] = []
    seen = set()
    for meta in sent:
        target = targets.get(meta.name)
        seen.add(meta.name)
        if target is None:
            findings.append(Finding("sent, but the engine has no such tensor", meta.name))
        elif target.shape != meta.shape:
            findings.append(Finding(f"sent with shape {meta.shape}, held with {target.shape}", meta.name))
        elif target.dtype != meta.dtype and not cast:
            findings.append(
                Finding(f"sent as {meta.dtype}, held as {target.dtype}", meta.name, "cast it where it is sent")
            )
    if not partial:
        findings.extend(Finding("held by the engine, but not sent", name) for name in targets if name not in seen)
    if findings:
        raise FindingsError("the weights sent do not match the engine", findings)
