"""Reading a torch.distributed.checkpoint folder: ``.metadata`` says which pieces of which tensor lie where.

Format: torch/distributed/checkpoint/{metadata,filesystem}.py; each piece is a file of torch.save inside a ``.distcp``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlctl.errors import Finding, UsageError
from rlctl.keys.boxes import Box, Shape, Span, volume
from rlctl.keys.dtypes import TORCH_NAMES, parse_dtype
from rlctl.keys.pickled import Global, Maker, PickleError, Record, record
from rlctl.keys.pieces import Piece, PiecedCheckpoint, PiecedTensor
from rlctl.keys.restricted_pickle import MAX_PICKLE_BYTES, load_pickle
from rlctl.keys.safetensors_header import MAX_DIMS, MAX_ELEMENTS, tensor_nbytes
from rlctl.keys.tensor_file import TensorFileError, inside_folder, open_regular, read_whole

_METADATA = "torch.distributed.checkpoint.metadata."
_OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata."
_MEGATRON_METADATA = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
_CLASSES = (
    *(_METADATA + name for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
                                    "BytesStorageMetadata", "StorageMeta", "MetadataIndex", "_MEM_FORMAT_ENCODING")),
    _OLD_PROPERTIES + "TensorProperties", _OLD_PROPERTIES + "MEM_FORMAT_ENCODING", _MEGATRON_METADATA,
    "torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout", "torch.device",
    "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath",
)  # fmt: skip
# Megatron keeps the plans of every rank beside the description; they are not looked at.
_INERT = ("torch.distributed.checkpoint.planner.",)
_ENUMS = tuple(name for name in _CLASSES if name.endswith("MEM_FORMAT_ENCODING"))


def _enum_member(owner: object, name: object) -> Record:
    """Return a member of an enumeration. Python 3.11.2 pickles one as ``getattr(class, name)``, 3.11.7 as
    ``class(value)``; no attribute of anything else is ever looked up."""
    of = owner.name if isinstance(owner, Global) else ""
    if (of not in _ENUMS and not of.startswith(_INERT)) or not isinstance(name, str):
        raise PickleError("the pickle asks for 'builtins.getattr' of no enumeration, which is not allowed")
    return Record(of, (name,))


_ALLOWED: dict[str, Maker] = {
    "builtins.getattr": _enum_member,
    "collections.OrderedDict": dict,
    "torch.Size": tuple,
    **{f"torch.{name}": record(f"torch.{name}") for name in TORCH_NAMES.values()},
    **{name: record(name) for name in _CLASSES},
}
_Infos = dict[tuple[str, Shape], tuple[str, int, int]]


def is_dcp(folder: Path) -> bool:
    """Whether ``folder`` looks like a torch.distributed.checkpoint folder."""
    return (folder / ".metadata").exists()


def open_dcp(folder: Path | str) -> PiecedCheckpoint:
    """Return the checkpoint in ``folder``. Only ``.metadata`` is read.

    A tensor with a piece that is missing, doubled, outside its file or outside the folder becomes a finding. Raises
    UsageError when there is no ``.metadata``, PickleError when it holds anything but a DCP description.
    """
    folder = Path(folder)
    path = folder / ".metadata"
    if not path.exists():
        raise UsageError("no torch.distributed.checkpoint folder: .metadata is missing", where=str(folder))
    root = load_pickle(read_whole(path, limit=MAX_PICKLE_BYTES), _ALLOWED, where=str(path), opaque=_INERT)
    if not isinstance(root, Record) or root.name not in (f"{_METADATA}Metadata", _MEGATRON_METADATA):
        raise PickleError("does not describe a checkpoint", where=str(path))
    tensors, storage = root.get("state_dict_metadata"), root.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(storage, dict):
        raise PickleError("does not list tensors and files", where=str(path))
    found = PiecedCheckpoint(folder, "dcp")
    infos = _storage_infos(storage, path)
    sizes: dict[str, int] = {}
    for name, description in tensors.items():
        if not isinstance(name, str) or not isinstance(description, Record):
            raise PickleError("a tensor without name or description", where=str(path))
        if description.name.endswith("BytesStorageMetadata"):
            found.objects.append(name)
        else:
            _add_tensor(name, description, infos, sizes, found)
    return found


def _storage_infos(storage: dict[Any, Any], path: Path) -> _Infos:
    infos: _Infos = {}
    for index, info in storage.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise PickleError("a piece without index or place", where=str(path))
        name, offset = index.get("fqn"), index.get("offset")
        if offset is None:
            continue  # an object that is no tensor
        file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str) or not isinstance(file, str) or not _naturals((start, length)):
            raise PickleError("a piece without name, file or range", where=str(path))
        if info.get("transform_descriptors"):
            raise PickleError(f"the pieces of {name!r:.200} are compressed or encrypted", where=str(path))
        infos[name, _shape(offset, path)] = (file, start, length)
    return infos


def _add_tensor(name: str, description: Record, infos: _Infos, sizes: dict[str, int], found: PiecedCheckpoint) -> None:
    path = found.path / ".metadata"
    properties, chunks = description.get("properties"), description.get("chunks")
    if not isinstance(properties, Record) or not isinstance(chunks, list):
        raise PickleError(f"tensor {name!r:.200} without element type or pieces", where=str(path))
    dtype = _dtype(properties, path)
    shape = _shape(description.get("size"), path)
    try:
        tensor_nbytes(dtype, shape)
    except ValueError as error:
        raise PickleError(f"tensor {name!r:.200}: {error}", where=str(path)) from error
    pieces = []
    for chunk in chunks:
        if not isinstance(chunk, Record):
            raise PickleError(f"tensor {name!r:.200} has a piece that is none", where=str(path))
        offsets, extents = _shape(chunk.get("offsets"), path), _shape(chunk.get("sizes"), path)
        if not len(offsets) == len(extents) == len(shape):
            raise PickleError(f"tensor {name!r:.200} has a piece of other dimensions", where=str(path))
        box = tuple(Span(start, size) for start, size in zip(offsets, extents, strict=True))
        if volume(box):
            pieces.extend(_piece(name, offsets, box, infos, sizes, found))
    found.add(PiecedTensor(name, dtype, shape, tuple(pieces)))


def _piece(
    name: str, offsets: Shape, box: Box, infos: _Infos, sizes: dict[str, int], found: PiecedCheckpoint
) -> list[Piece]:
    info = infos.get((name, offsets))
    if info is None:
        found.findings.append(
            Finding(f"tensor {name!r:.200}: no file for its piece at {list(offsets)}", str(found.path))
        )
        return []
    file, start, length = info
    if file not in sizes:
        sizes[file] = _file_size(file, found)
    if start + length > sizes[file]:
        if sizes[file] >= 0:
            found.findings.append(
                Finding(f"tensor {name!r:.200}: a piece lies behind the end of {file!r:.200}", str(found.path))
            )
        return []
    return [Piece(box, found.path / file, None, start, length)]


def _file_size(file: str, found: PiecedCheckpoint) -> int:
    """Return the size of a file of the checkpoint; -1, with a finding, when it cannot be used."""
    path = inside_folder(found.path, file)
    if path is None:
        found.findings.append(Finding(f"file {file!r:.200} is not inside the folder", str(found.path)))
        return -1
    try:
        fd, size = open_regular(path)
    except TensorFileError as error:
        found.findings.append(Finding(error.message, error.where))
        return -1
    os.close(fd)
    return size


def _dtype(properties: Record, path: Path) -> str:
    state = properties.state
    named = state[0] if isinstance(state, tuple) and len(state) == 5 else properties.get("dtype")
    if not isinstance(named, Global) or named.name.removeprefix("torch.") not in TORCH_NAMES.values():
        raise PickleError("a tensor without a known element type", where=str(path))
    return parse_dtype(named.name)


def _shape(value: Any, path: Path) -> Shape:
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS or not _naturals(value):
        raise PickleError("a shape that is no list of whole numbers", where=str(path))
    return tuple(value)


def _naturals(values: Any) -> bool:
    return all(type(value) is int and 0 <= value <= MAX_ELEMENTS for value in values)
