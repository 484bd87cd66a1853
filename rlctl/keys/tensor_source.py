"""Opening whatever holds tensors, by what lies there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlctl.errors import Finding, UsageError
from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.dcp import is_dcp, open_dcp
from rlctl.keys.rank_files import open_rank_files, open_torch_file, rank_files

if TYPE_CHECKING:
    import torch


class DescribedTensor(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """Safetensors code."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class TensorSource(Protocol):
    """An open checkpoint of any kind: tensors are described at once and read one at a time."""

    path: Path
    findings: list[Finding]

    @property
    def kind(self) -> str:
        """``file``, ``model``, ``adapter``, ``dcp``, ``rank-files`` or ``torch-file``."""
        ...

    @property
    def entries(self) -> Mapping[str, DescribedTensor]:
        """Every tensor by name."""
        ...

    def check(self) -> None:
        """Raise CheckpointError when anything is missing or damaged."""

    def tensor(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return one whole tensor, read into ``out`` or into fresh memory."""
        ...

    def close(self) -> None:
        """Close the files."""


def open_tensors(path: Path | str) -> TensorSource:
    """Open a safetensors file or folder, an adapter, a torch.distributed.checkpoint folder, rank files or a torch file.

    Faults between index and files are gathered in ``findings``. Raises UsageError when nothing known lies at ``path``.
    """
    path = Path(path)
    if path.is_dir():
        if is_dcp(path):
            return open_dcp(path)
        if not any(path.glob("*.safetensors")) and not any(path.glob("*.safetensors.index.json")):
            ranks = rank_files(path)
            if ranks:
                return open_rank_files(ranks, path)
            single = path / "pytorch_model.bin"
            if single.is_file():
                return open_torch_file(single)
        return Checkpoint.open(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        if not path.exists():
            raise UsageError("no such file or folder", where=str(path))
        return open_torch_file(path)
    return Checkpoint.open(path)
