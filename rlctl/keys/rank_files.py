"""Reading what each rank saved for itself: files of DTensor shards, put together by their placements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlctl.errors import Finding, UsageError
from rlctl.keys.boxes import Box, Shape, extent, volume, whole
from rlctl.keys.pieces import Piece, PiecedCheckpoint, PiecedTensor
from rlctl.keys.placements import DTensorShard, PlacementError
from rlctl.keys.stored_tensor import StoredTensor
from rlctl.keys.torch_file import read_torch_file, tensors_in

_RANK_FILE = re.compile(r"(?P<stem>.*?)[_-]?rank[_-]?(?P<rank>\d+)\.(?:pt|pth|bin)")


def rank_files(folder: Path) -> list[Path]:
    """Return the files of one model's ranks in ``folder`` by rank: ``model_world_size_4_rank_2.pt``, ``rank0.pt``, ...

    Empty when there are none. Where several kinds lie together (model, optimizer), those named ``model...`` are it.
    """
    kinds: dict[str, dict[int, Path]] = {}
    for path in folder.iterdir():
        named = _RANK_FILE.fullmatch(path.name)
        if named and path.is_file():
            kinds.setdefault(named["stem"], {})[int(named["rank"])] = path
    if len(kinds) > 1:
        kinds = {stem: files for stem, files in kinds.items() if stem.startswith("model")} or kinds
    if len(kinds) > 1:
        raise UsageError(
            f"several kinds of rank files: {', '.join(sorted(kinds))}", where=str(folder), fix="name the files"
        )
    return [path for files in kinds.values() for _, path in sorted(files.items())]


def open_rank_files(paths: Sequence[Path], folder: Path) -> PiecedCheckpoint:
    """Return the whole tensors that the files of all ranks hold together.

    A DTensor is put together from its shards; a plain tensor must be the same shape in every file, and the first is
    taken. A missing rank, or shards that do not fit together, become findings. Raises PickleError or TensorFileError
    for a file that cannot be read.
    """
    found = PiecedCheckpoint(folder, "rank-files")
    gathered: dict[str, _Gathered] = {}
    for path in paths:
        for name, tensor in tensors_in(read_torch_file(path), where=str(path)):
            gathered.setdefault(name, _Gathered(name)).add(tensor, path, found)
    for each in gathered.values():
        found.add(each.result())
    return found


def open_torch_file(path: Path) -> PiecedCheckpoint:
    """Return the tensors of one file that torch.save wrote (``pytorch_model.bin``, ``consolidated.pth``)."""
    found = open_rank_files([path], path)
    found.kind = "torch-file"
    return found


class _Gathered:
    """The pieces of one tensor so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind: tuple[str, Shape] | None = None
        self.pieces: dict[Box, Piece] = {}

    def add(self, tensor: StoredTensor | DTensorShard, path: Path, found: PiecedCheckpoint) -> None:
        local = tensor.local if isinstance(tensor, DTensorShard) else tensor
        where = f"{path}: tensor {self.name!r:.200}"
        kind = (local.dtype, tensor.shape)
        if self.kind not in (None, kind):
            found.findings.append(Finding(f"is {kind[0]} {list(kind[1])} here and other in another rank's file", where))
            return
        self.kind = kind
        try:
            box = tensor.box if isinstance(tensor, DTensorShard) else whole(tensor.shape)
        except PlacementError as error:
            found.findings.append(Finding(error.message, where, error.fix))
            return
        if extent(box) != local.shape:
            found.findings.append(Finding(f"holds {list(local.shape)} where {list(extent(box))} belongs", where))
        elif volume(box) or not self.pieces:
            self.pieces.setdefault(box, Piece(box, path, local))

    def result(self) -> PiecedTensor:
        assert self.kind is not None
        return PiecedTensor(self.name, self.kind[0], self.kind[1], tuple(self.pieces.values()))
