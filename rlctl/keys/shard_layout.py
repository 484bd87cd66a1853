"""Which tensor lies where in the shards of a checkpoint to be written: pure planning, decided before any byte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlctl.errors import UsageError
from rlctl.keys.dtypes import DTYPE_BITS
from rlctl.keys.safetensors_header import build_header, tensor_nbytes

DEFAULT_SHARD_BYTES = 5 << 30
METADATA: Mapping[str, str] = {"format": "pt"}  # transformers refuses a file that does not say so


@dataclass(frozen=True)
class TensorShape:
    """A tensor to be written: its name, safetensors dtype code and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return tensor_nbytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Placed:
    """Where a tensor goes: shard file, offset from the start of that file, bytes, and what it is."""

    tensor: TensorShape
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """One file to be written: its header (length prefix included) and its tensors in order."""

    file: str
    header: bytes
    tensors: tuple[Placed, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(placed.nbytes for placed in self.tensors)


@dataclass(frozen=True)
class ShardLayout:
    """Every file of a checkpoint to be written. ``index`` is None when one file holds all."""

    shards: tuple[Shard, ...]
    index: str | None

    @property
    def placed(self) -> dict[str, Placed]:
        """Name -> place of every tensor."""
        return {placed.tensor.name: placed for shard in self.shards for placed in shard.tensors}

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, the index's ``total_size``."""
        return sum(placed.nbytes for shard in self.shards for placed in shard.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.nbytes for shard in self.shards)

    def index_content(self) -> dict[str, object]:
        """Return the index file's content."""
        weight_map = {placed.tensor.name: shard.file for shard in self.shards for placed in shard.tensors}
        return {"metadata": {"total_size": self.total_size}, "weight_map": weight_map}


def plan_shards(
    tensors: Iterable[TensorShape],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    stem: str = "model",
    metadata: Mapping[str, str] = METADATA,
) -> ShardLayout:
    """Return the layout of ``tensors`` in their order, a new shard where the next tensor would pass the limit.

    A tensor larger than the limit gets a shard of its own. Raises UsageError for two tensors of one name.
    """
    if max_shard_bytes <= 0:
        raise UsageError(f"a shard of {max_shard_bytes} bytes can hold nothing")
    groups: list[list[TensorShape]] = [[]]
    used = 0
    for tensor in tensors:
        size = tensor.nbytes
        if groups[-1] and used + size > max_shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += size
    return plan_groups(groups, stem=stem, metadata=metadata)


def plan_groups(
    groups: Sequence[Sequence[TensorShape]], *, stem: str = "model", metadata: Mapping[str, str] = METADATA
) -> ShardLayout:
    """Return the layout with one shard per group: how a rename keeps the source's shards, and so copies them whole."""
    _check_names(groups)
    count = len(groups)
    shards = []
    for number, group in enumerate(groups, start=1):
        file = f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        ordered = _aligned(group)
        header = build_header(((t.name, t.dtype, t.shape) for t in ordered), metadata)
        offset = len(header)
        placed = []
        for tensor in ordered:
            placed.append(Placed(tensor, file, offset, tensor.nbytes))
            offset += tensor.nbytes
        shards.append(Shard(file, header, tuple(placed)))
    return ShardLayout(tuple(shards), None if count == 1 else f"{stem}.safetensors.index.json")


def _check_names(groups: Sequence[Sequence[TensorShape]]) -> None:
    seen: set[str] = set()
    for group in groups:
        for tensor in group:
            if tensor.name == "__metadata__":
                raise UsageError("a tensor cannot be named '__metadata__'")
            if tensor.name in seen:
                raise UsageError(f"two tensors would be named {tensor.name!r}")
            seen.add(tensor.name)


def _aligned(group: Sequence[TensorShape]) -> Sequence[TensorShape]:
    """Return the tensors in their order if each then starts at a multiple of its element, else widest elements first.

    Readers view the file's bytes as elements, which some refuse at an odd offset; the format allows no padding.
    """
    offset = 0
    for tensor in group:
        if offset % max(DTYPE_BITS[tensor.dtype] // 8, 1):
            return sorted(group, key=lambda t: -DTYPE_BITS[t.dtype])
        offset += tensor.nbytes
    return group
