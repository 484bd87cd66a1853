"""Reading what torch.save wrote: tensors in place, everything else as plain values. No class is imported or called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from rlctl.keys.dtypes import DTYPE_BITS, TORCH_NAMES, parse_dtype
from rlctl.keys.pickled import Global, Maker, PickleError, Record, record
from rlctl.keys.placements import DTENSOR_MODULES, DTensorShard, dtensor_shard
from rlctl.keys.restricted_pickle import MAX_PICKLE_BYTES, load_pickle
from rlctl.keys.safetensors_header import MAX_DIMS, MAX_ELEMENTS
from rlctl.keys.stored_tensor import StoredTensor
from rlctl.keys.tensor_file import OpenFiles, TensorFileError
from rlctl.keys.zip_records import ZipRecord, zip_records

MAX_DEPTH = 64
MAX_TENSORS = 4 << 20
_STORAGES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "ComplexFloat": "C64",
    "Long": "I64", "Int": "I32", "Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL",
}  # fmt: skip
_UNTYPED = frozenset({"torch.UntypedStorage", "torch.storage.UntypedStorage"})
_PLAIN = (
    "torch._utils._rebuild_wrapper_subclass", "torch.device", "torch.serialization._get_layout",
    "argparse.Namespace", "pathlib.PosixPath", "__builtin__.set", "builtins.set", "__builtin__.bytes", "builtins.bytes",
)  # fmt: skip
# Classes that training frameworks leave in their files beside the tensors; they become inert records.
FOREIGN = ("megatron.", "numpy.", "_codecs.", "enum.", "apex.", "transformer_engine.")

Tensor = StoredTensor | DTensorShard


def read_torch_file(path: Path, *, start: int = 0, length: int | None = None, foreign: tuple[str, ...] = ()) -> Any:
    """Return what torch.save wrote into ``path`` (or into ``length`` bytes of it from ``start``).

    Tensors are StoredTensor (or DTensorShard) whose data is not read yet, dicts and lists are themselves, objects of
    other allowed classes are inert Records.

    Args:
        foreign: prefixes of class names that become inert Records instead of being refused; ``FOREIGN`` for the files
            of Megatron.

    Raises PickleError for a class that is not allowed, TensorFileError for a damaged file.
    """
    records = zip_records(path, start, length)
    where = str(path)
    roots = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise TensorFileError("not a file that torch.save wrote", where=where, fix="no data.pkl record")
    root = roots[0].removesuffix("data.pkl")
    files = OpenFiles()
    try:
        if _bytes(files, path, records.get(f"{root}byteorder")) not in (b"", b"little"):
            raise TensorFileError("was written on a big-endian machine", where=where)
        text = _bytes(files, path, records[roots[0]])
    finally:
        files.close()
    rebuild = _Rebuild(path, records, root)
    return load_pickle(
        text, rebuild.allowed, where=where, opaque=(*DTENSOR_MODULES, *foreign), persistent=rebuild.storage
    )


def single_tensor(path: Path, start: int, length: int) -> StoredTensor:
    """Return the one tensor that torch.save wrote into a stretch of a file (an item of a ``.distcp`` file)."""
    found = read_torch_file(path, start=start, length=length)
    if not isinstance(found, StoredTensor):
        raise TensorFileError(f"bytes {start} to {start + length} hold no tensor", where=str(path))
    return found


def tensors_in(value: Any, *, where: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (dotted name, tensor) of every tensor in nested dicts and lists, in order.

    Raises TensorFileError for nesting or numbers that no real file has, and for two tensors of one name.
    """
    seen: set[str] = set()
    for name, tensor in _walk("", value, 0, where):
        if name in seen or len(seen) > MAX_TENSORS:
            raise TensorFileError(f"two tensors are named {name!r:.200}", where=where)
        seen.add(name)
        yield name, tensor


def _walk(name: str, value: Any, depth: int, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, StoredTensor | DTensorShard):
        yield name, value
        return
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    if items and depth >= MAX_DEPTH:
        raise TensorFileError("the values are nested too deeply", where=where)
    for key, inner in items:
        if isinstance(inner, StoredTensor | DTensorShard | dict | list | tuple):
            part = key if isinstance(key, str) else str(key) if isinstance(key, int) else None
            if part is not None:
                yield from _walk(f"{name}.{part}" if name else part, inner, depth + 1, where)


def _bytes(files: OpenFiles, path: Path, found: ZipRecord | None) -> bytes:
    if found is None:
        return b""
    if found.nbytes > MAX_PICKLE_BYTES:
        raise PickleError(f"a pickle of {found.nbytes} bytes is too large", where=str(path))
    buffer = bytearray(found.nbytes)
    files.read_at(path, found.offset, memoryview(buffer))
    return bytes(buffer)


class _Rebuild:
    """Makes StoredTensors out of the calls that torch.save records."""

    def __init__(self, path: Path, records: Mapping[str, ZipRecord], root: str) -> None:
        self.path, self.records, self.root = path, records, root
        self.allowed: dict[str, Maker] = {
            "collections.OrderedDict": _ordered_dict,
            "torch.Size": tuple,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_tensor_v3": self.tensor_v3,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
            "torch._tensor._rebuild_from_type_v2": _from_type,
            **{f"torch.{name}": record(f"torch.{name}") for name in TORCH_NAMES.values()},
            **{f"torch.{name}Storage": record(name) for name in _STORAGES},
            **{name: record(name) for name in (*_UNTYPED, *_PLAIN)},
        }

    def storage(self, identity: Any) -> Record:
        """Resolve ``("storage", class, key, device, element count)`` to a Record of (dtype or None, record, count)."""
        if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
            raise self.fault("a reference that is no storage")
        _, kind, key, _, count = identity
        if not isinstance(kind, Global) or not isinstance(key, str) or type(count) is not int or count < 0:
            raise self.fault("a storage without class, key or size")
        dtype = _STORAGES.get(kind.name.removeprefix("torch.").removesuffix("Storage"))
        if dtype is None and kind.name not in _UNTYPED:
            raise self.fault(f"a storage of class {kind.name!r:.200}")
        found = self.records.get(f"{self.root}data/{key}")
        if found is None:
            raise self.fault(f"storage {key!r:.80} is not in the archive")
        return Record("storage", (dtype, found))

    def tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        _grad: Any = None,
        _hooks: Any = None,
        _meta: Any = None,
    ) -> StoredTensor:
        dtype, found = self._storage_parts(storage)
        if dtype is None:
            raise self.fault("a tensor whose element type is not said")
        return self._stored(dtype, found, offset, shape, stride)

    def tensor_v3(
        self, storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, _meta: Any = None
    ) -> StoredTensor:
        if not isinstance(dtype, Global) or not dtype.name.startswith("torch."):
            raise self.fault("a tensor whose element type is not said")
        return self._stored(parse_dtype(dtype.name), self._storage_parts(storage)[1], offset, shape, stride)

    def _storage_parts(self, storage: Any) -> tuple[str | None, ZipRecord]:
        if not isinstance(storage, Record) or storage.name != "storage" or len(storage.args) != 2:
            raise self.fault("a tensor without storage")
        return storage.args

    def _stored(self, dtype: str, found: ZipRecord, offset: Any, shape: Any, stride: Any) -> StoredTensor:
        if not (_naturals(shape) and _naturals(stride) and _naturals((offset,)) and len(shape) == len(stride)):
            raise self.fault("a tensor whose shape or strides are not whole numbers")
        if prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
            raise self.fault("a tensor of absurd size")
        if prod(shape) * DTYPE_BITS[dtype] // 8 > found.nbytes:
            raise self.fault(f"a tensor of {dtype} {list(shape)} that its storage of {found.nbytes} bytes cannot hold")
        stored = StoredTensor(
            dtype, tuple(shape), tuple(stride), self.path, found.offset + offset * DTYPE_BITS[dtype] // 8
        )
        if stored.offset + stored.span > found.offset + found.nbytes:
            raise self.fault(f"a tensor of {dtype} {list(shape)} that ends after its storage of {found.nbytes} bytes")
        return stored

    def fault(self, message: str) -> PickleError:
        return PickleError(message, where=str(self.path))


def _ordered_dict(*pairs: Any) -> dict[Any, Any]:
    if pairs and not isinstance(pairs[0], list):
        raise TypeError
    found = {}
    for key, value in pairs[0] if pairs else ():
        if not isinstance(key, str | int):
            raise TypeError
        found[key] = value
    return found


def _from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    if not isinstance(function, Global) or not isinstance(kind, Global) or not isinstance(arguments, tuple):
        raise TypeError
    if kind.name.endswith(".DTensor"):
        return dtensor_shard(arguments, state)
    return function.make(*arguments)


def _naturals(values: Any) -> bool:
    return (
        isinstance(values, tuple | list)
        and len(values) <= MAX_DIMS
        and all(type(value) is int and 0 <= value <= MAX_ELEMENTS for value in values)
    )
