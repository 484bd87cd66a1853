"""A safetensors checkpoint as users have it: one file, a folder of shards with an index, or an adapter folder.

Opening reads headers only. Tensors are read one at a time, so a checkpoint larger than memory can pass through.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from rlctl.errors import EXIT_CHECK, Finding, FindingsError, UsageError
from rlctl.keys.checkpoint_index import IndexedTensors, add_shard, read_index
from rlctl.keys.json_file import read_object
from rlctl.keys.model_spec import CONFIG_BYTES
from rlctl.keys.tensor_file import OpenFiles, TensorEntry

if TYPE_CHECKING:
    import torch

INDEX_SUFFIX = ".safetensors.index.json"
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


class CheckpointError(FindingsError):
    """A checkpoint's index and shards disagree (exit 4)."""

    exit_code = EXIT_CHECK


class Checkpoint:
    """An open checkpoint.

    Attributes:
        path: the folder or the file it was opened from.
        kind: ``"file"``, ``"model"`` (folder) or ``"adapter"`` (folder with adapter_config.json).
        entries: name -> TensorEntry, in the order of files and of bytes within them.
        metadata: the ``__metadata__`` of the shards, merged.
        files: the tensor files that could be read.
        findings: every fault of index and shards; ``check()`` raises them.
    """

    def __init__(
        self, path: Path, kind: Literal["file", "model", "adapter"], tensors: IndexedTensors, config: dict[str, Any]
    ) -> None:
        self.path = path
        self.kind = kind
        self.entries: dict[str, TensorEntry] = tensors.entries
        self.metadata = tensors.metadata
        self.files = tensors.files
        self.findings: list[Finding] = tensors.findings
        self.config = config
        self._open = OpenFiles()

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Open a ``.safetensors`` file, an index file, or a folder with a model or an adapter.

        Faults of index and shards are gathered in ``findings``, not raised. Raises UsageError when there is no
        safetensors checkpoint at ``path``, JsonError or TensorFileError when its index or its configuration cannot be
        used at all.
        """
        path = Path(path)
        if path.name.endswith(INDEX_SUFFIX):
            return cls(path.parent, "model", read_index(path), _config(path.parent / "config.json"))
        if not path.is_dir():
            if not path.exists():
                raise UsageError("no such file or folder", where=str(path))
            found = IndexedTensors()
            add_shard(path, found)
            return cls(path, "file", found, {})
        if is_adapter(path):
            return cls(path, "adapter", _adapter(path), _config(path / "adapter_config.json"))
        return cls(path, "model", _model(path), _config(path / "config.json"))

    def check(self) -> None:
        """Raise CheckpointError when index and shards disagree in anything."""
        if self.findings:
            raise CheckpointError(f"{self.path}: damaged checkpoint", self.findings)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def read_into(self, name: str, buffer: memoryview, start: int = 0) -> None:
        """Fill ``buffer`` (writable bytes) with the bytes of tensor ``name`` from its byte ``start`` on."""
        self._open.read_into(self.entries[name], buffer, start)

    def tensor(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return tensor ``name``, read into ``out`` (same dtype and shape) or into fresh memory.

        Reusing ``out`` saves the page faults that fresh memory costs. Raises TensorFileError naming file and tensor.
        """
        from rlctl.keys.tensor_values import read_tensor

        return read_tensor(self._open, self.entries[name], out)

    def close(self) -> None:
        """Close the files; reading again opens them again."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_adapter(folder: Path) -> bool:
    """Tell whether ``folder`` is that of an adapter, and not of a model that an adapter's configuration lies beside."""
    if not (folder / "adapter_config.json").exists():
        return False
    weights = ("*.safetensors", "*.pt", "*.pth", "*.bin", "*.distcp")
    return any(folder.glob("adapter_model*")) or not any(any(folder.glob(one)) for one in weights)


def _config(path: Path) -> dict[str, Any]:
    return read_object(path, limit=CONFIG_BYTES) if path.exists() else {}


def _adapter(folder: Path) -> IndexedTensors:
    found = IndexedTensors()
    file = folder / "adapter_model.safetensors"
    if file.exists():
        add_shard(file, found)
        return found
    index = folder / f"adapter_model{INDEX_SUFFIX}"
    if index.exists():
        return read_index(index)
    raise UsageError(
        "adapter_config.json without adapter_model.safetensors",
        where=str(folder),
        fix="an old adapter_model.bin must be saved again with safetensors"
        if (folder / "adapter_model.bin").exists()
        else None,
    )


def _model(folder: Path) -> IndexedTensors:
    index = folder / f"model{INDEX_SUFFIX}"
    if index.exists():
        return read_index(index)
    single = folder / "model.safetensors"
    if single.exists():
        found = IndexedTensors()
        add_shard(single, found)
        return found
    others = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if len(others) == 1:
        return read_index(others[0])
    return _loose_shards(folder)


def _loose_shards(folder: Path) -> IndexedTensors:
    found = IndexedTensors()
    paths = sorted(p for p in folder.glob("*.safetensors"))
    if not paths:
        raise UsageError(
            "no .safetensors file in this folder", where=str(folder), fix=f"it holds {_listing(folder) or 'nothing'}"
        )
    counts: dict[tuple[str, int], set[int]] = {}
    for path in paths:
        add_shard(path, found)
        named = _SHARD_NAME.fullmatch(path.name)
        if named:
            counts.setdefault((named["stem"], int(named["count"])), set()).add(int(named["number"]))
    for (stem, count), numbers in counts.items():
        missing = sorted(set(range(1, min(count, 100_000) + 1)) - numbers)
        if missing:
            found.findings.append(
                Finding(f"no index, and shard {missing[0]} of {count} of {stem!r} is missing", str(folder))
            )
    return found


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
