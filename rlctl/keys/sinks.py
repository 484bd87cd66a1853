"""Where converted tensors are written: safetensors shards, or the rank folders of Megatron."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.keys.byte_copy import copy_range, pwrite_all
from rlctl.keys.layout import Ref, TensorInfo
from rlctl.keys.plan import Plan
from rlctl.keys.shard_layout import DEFAULT_SHARD_BYTES, ShardLayout, TensorShape, plan_groups, plan_shards
from rlctl.keys.shard_writer import ShardWriter
from rlctl.keys.stored_tensors import StoredTensors
from rlctl.keys.tensor_file import OpenFiles, TensorEntry

if TYPE_CHECKING:
    import torch

MODEL_FILE = "model_optim_rng.pt"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes that go unchanged from a stored tensor into a target: both offsets count from the tensor's first byte."""

    entry: TensorEntry
    start: int
    at: int
    count: int


class Sink(ABC):
    """Takes every target tensor once, in any order; bytes of a target that are never given stay zero."""

    @abstractmethod
    def copy(self, jobs: Iterable[tuple[Ref, TensorEntry]]) -> None:
        """Copy whole tensors, byte for byte."""

    @abstractmethod
    def stretches(self, ref: Ref, stretches: Sequence[Stretch]) -> None:
        """Put a tensor together from unchanged bytes."""

    @abstractmethod
    def write(self, ref: Ref, tensor: torch.Tensor) -> None:
        """Write a contiguous tensor of the planned shape and dtype."""

    @abstractmethod
    def write_pieces(self, ref: Ref, pieces: Iterable[torch.Tensor]) -> None:
        """Write contiguous pieces of the planned dtype that fill a tensor in order."""

    @abstractmethod
    def finish(self) -> None:
        """Complete and close every file."""

    @abstractmethod
    def close(self) -> None:
        """Close every file, complete or not."""


class SafetensorsSink(Sink):
    """Writes one folder of safetensors shards with its index."""

    def __init__(self, folder: Path, layout: ShardLayout) -> None:
        self._writer = ShardWriter(folder, layout)

    def copy(self, jobs: Iterable[tuple[Ref, TensorEntry]]) -> None:
        self._writer.copy((ref.name, entry) for ref, entry in jobs)

    def stretches(self, ref: Ref, stretches: Sequence[Stretch]) -> None:
        self._writer.copy_stretches(ref.name, ((s.entry, s.start, s.at, s.count) for s in stretches))

    def write(self, ref: Ref, tensor: torch.Tensor) -> None:
        self._writer.write(ref.name, tensor)

    def write_pieces(self, ref: Ref, pieces: Iterable[torch.Tensor]) -> None:
        self._writer.write_pieces(ref.name, pieces)

    def finish(self) -> None:
        self._writer.finish()

    def close(self) -> None:
        self._writer.close()


def shard_layout(plan: Plan, source: StoredTensors, max_shard_bytes: int | None) -> ShardLayout:
    """Return the files that the targets of ``plan`` go to.

    A plan that only renames keeps the source's files and their order, so that they are copied whole; any other, or one
    with a limit on the size of a shard, starts a new shard where the next tensor would pass the limit.
    """
    shapes = {move.target: TensorShape(move.target.name, move.dtype, move.shape) for move in plan.moves}
    if max_shard_bytes is None and all(set(move.transforms) <= {"copy", "rename"} for move in plan.moves):
        groups: dict[Path, list[tuple[int, TensorShape]]] = {}
        for move in plan.moves:
            entry = source.entry(move.sources[0])
            if entry is None:
                break
            groups.setdefault(entry.file, []).append((entry.offset, shapes[move.target]))
        else:
            ordered = [sorted(groups[file], key=lambda one: one[0]) for file in source.files() if file in groups]
            return plan_groups([[shape for _, shape in group] for group in ordered])
    return plan_shards(shapes.values(), max_shard_bytes=max_shard_bytes or DEFAULT_SHARD_BYTES)


class MegatronSink(Sink):
    """Writes one ``torch.save`` file a rank, under ``folder/<rank>/model_optim_rng.pt``."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        from rlctl.keys.torch_writer import write_structure

        ranks: dict[str, dict[str, TensorInfo]] = {}
        for move in plan.moves:
            ranks.setdefault(move.target.shard, {})[move.target.name] = TensorInfo(move.shape, move.dtype)
        self._paths = {rank: folder / rank / MODEL_FILE for rank in ranks}
        self._offsets: dict[str, dict[str, int]] = {}
        for rank, tensors in ranks.items():
            self._paths[rank].parent.mkdir(parents=True)
            extra = {"checkpoint_version": 3.0, "iteration": 0}
            self._offsets[rank] = write_structure(self._paths[rank], tensors, extra)
        self._sources = OpenFiles()
        self._targets = OpenFiles(writable=True)

    def copy(self, jobs: Iterable[tuple[Ref, TensorEntry]]) -> None:
        for ref, entry in jobs:
            self.stretches(ref, [Stretch(entry, 0, 0, entry.nbytes)])

    def stretches(self, ref: Ref, stretches: Sequence[Stretch]) -> None:
        target, first = self._place(ref)
        for one in stretches:
            entry = one.entry
            source = self._sources.descriptor(entry.file)
            where = f"{entry.file}: tensor {entry.name!r}"
            copy_range(source, entry.offset + one.start, target, first + one.at, one.count, where=where)

    def write(self, ref: Ref, tensor: torch.Tensor) -> None:
        from rlctl.keys.tensor_values import tensor_bytes

        target, first = self._place(ref)
        pwrite_all(target, tensor_bytes(tensor), first)

    def write_pieces(self, ref: Ref, pieces: Iterable[torch.Tensor]) -> None:
        from rlctl.keys.tensor_values import tensor_bytes

        target, at = self._place(ref)
        for piece in pieces:
            pwrite_all(target, tensor_bytes(piece), at)
            at += piece.nbytes

    def finish(self) -> None:
        from rlctl.keys.torch_writer import set_checksums

        self.close()
        for path in self._paths.values():
            set_checksums(path)

    def close(self) -> None:
        self._sources.close()
        self._targets.close()

    def _place(self, ref: Ref) -> tuple[int, int]:
        return self._targets.descriptor(self._paths[ref.shard]), self._offsets[ref.shard][ref.name]
