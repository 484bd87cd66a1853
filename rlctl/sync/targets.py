"""Where the tensors of a sync go, and where their bytes come from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from rlctl.keys.dtypes import dtype_code
from rlctl.sync.buckets import Buffer, FilledBucket, flat_bytes
from rlctl.sync.digest import Bytes
from rlctl.sync.errors import MismatchError
from rlctl.sync.runs import APART_NBYTES
from rlctl.sync.tensor_meta import BucketMeta, Chunk, TensorMeta, require_same_dtype


class Target(NamedTuple):
    """Where a tensor goes; ``array``: its bytes, where they lie in order on the CPU."""

    tensor: torch.Tensor
    meta: TensorMeta
    array: Bytes | None
    address: int
    layout: tuple[torch.Size, tuple[int, ...], torch.dtype]


Targets = Mapping[str, Target]
NO_TARGETS: Targets = MappingProxyType({})


def target_of(name: str, tensor: torch.Tensor, last: Target | None) -> Target:
    """Return where a tensor goes: as in the ``last`` sync, if it lies where it lay."""
    address, layout = tensor.data_ptr(), (tensor.shape, tensor.stride(), tensor.dtype)
    if last is not None and last.tensor is tensor and last.address == address and last.layout == layout:
        return last
    return Target(tensor, TensorMeta.of(name, tensor), flat_bytes(tensor), address, layout)


class Content:
    """The bytes of a bucket's chunks, by number: in the bucket, or where they are placed."""

    def __init__(self, bucket: FilledBucket) -> None:
        self._memory = Buffer.of(bucket.data)
        self._begin = bucket.data.data_ptr()
        self._placed = bucket.placed

    def tensor(self, number: int, chunk: Chunk) -> torch.Tensor:
        """Return a chunk's bytes."""
        if number in self._placed:
            return self._placed[number]
        return self._memory.tensor[chunk.offset : chunk.offset + chunk.nbytes]

    def address(self, number: int, chunk: Chunk) -> int:
        """Return where they begin."""
        return self._placed[number].data_ptr() if number in self._placed else self._begin + chunk.offset

    def pair(self, number: int, chunk: Chunk, target: Target | None) -> tuple[Bytes, Bytes] | None:
        """Return the arrays to copy to and from, when a plain copy does it."""
        if target is None or target.array is None or self._memory.array is None or target.meta != chunk.tensor:
            return None
        to = target.array[chunk.start : chunk.start + chunk.nbytes]
        if number in self._placed:
            return to, self._placed[number].numpy()
        return to, self._memory.array[chunk.offset : chunk.offset + chunk.nbytes]


def matching(meta: TensorMeta, target: torch.Tensor, *, cast: bool) -> torch.Tensor:
    """Return the tensor to write ``meta``'s bytes into. Raises MismatchError when shape or dtype differ."""
    if tuple(target.shape) != meta.shape:
        raise MismatchError(f"tensor {meta.name} is sent as {meta.shape}, and the engine holds {tuple(target.shape)}")
    if not cast:
        require_same_dtype(meta, dtype_code(target.dtype))
    return target.detach()


def places_of(meta: BucketMeta, targets: Targets) -> dict[int, torch.Tensor]:
    """Return the large chunks of a bucket that can be received right into their targets, as number -> bytes there:
    same shape and dtype, in order, on the CPU."""
    found = {}
    for number, chunk in enumerate(meta.chunks):
        target = targets.get(chunk.tensor.name) if chunk.nbytes >= APART_NBYTES else None
        if target is not None and target.array is not None and target.meta == chunk.tensor:
            found[number] = torch.from_numpy(target.array[chunk.start : chunk.start + chunk.nbytes])
    return found


class _Placement(NamedTuple):
    """What was found for the chunks of a bucket."""

    chunks: tuple[Chunk, ...]
    found: Mapping[int, torch.Tensor]


class Placements:
    """``places_of`` over the syncs into the same ``targets``: the same object as last time when nothing changed."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self._last: dict[tuple[str, int], _Placement] = {}

    def to(self, targets: Targets) -> Placements:
        """Return this, or others for other targets: what is kept holds their memory."""
        return self if targets is self.targets else Placements(targets)

    def of(self, meta: BucketMeta) -> Mapping[int, torch.Tensor]:
        """See ``places_of``."""
        key = meta.key
        last = self._last.get(key)
        if last is None or last.chunks is not meta.chunks:
            last = self._last[key] = _Placement(meta.chunks, places_of(meta, self.targets))
        return last.found
