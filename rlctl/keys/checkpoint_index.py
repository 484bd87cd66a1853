"""The index of a sharded checkpoint, and everything in which it and the shards can disagree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.errors import Finding, RlctlError
from rlctl.keys.json_file import JsonError, read_object
from rlctl.keys.safetensors_header import Header, read_header
from rlctl.keys.tensor_file import TensorEntry, inside_folder

MAX_SHARDS = 100_000


@dataclass
class IndexedTensors:
    """What an index and its shards together hold: usable entries, and every fault found on the way."""

    entries: dict[str, TensorEntry] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def read_index(index: Path) -> IndexedTensors:
    """Return the tensors that ``index`` (``model.safetensors.index.json``) names and its shards really hold.

    Faults become findings: a shard that is missing, damaged or outside the folder, a tensor that is not in its shard,
    in a shard but not in the index, or in several shards, and a wrong ``total_size``. Raises JsonError when the index
    itself cannot be used.
    """
    content = read_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise JsonError("weight_map must map tensor names to file names", where=str(index))
    found = IndexedTensors()
    names_of: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names_of.setdefault(file, []).append(name)
    if len(names_of) > MAX_SHARDS:
        raise JsonError(f"names {len(names_of)} files", where=str(index))
    for file, names in sorted(names_of.items()):
        _read_shard(index, file, names, weight_map, found)
    _check_total(content.get("metadata"), index, found)
    _unlisted_shards(index, names_of, found)
    return found


def add_shard(path: Path, found: IndexedTensors) -> Header | None:
    """Read one shard's header into ``found``; a name that is there already is a finding. None: it cannot be read."""
    try:
        header = read_header(path)
    except RlctlError as error:
        found.findings.append(Finding(error.message, error.where or str(path), error.fix))
        return None
    found.files.append(path)
    found.metadata.update(header.metadata)
    for entry in header.entries:
        other = found.entries.get(entry.name)
        if other is not None:
            found.findings.append(Finding(f"tensor {entry.name!r} is also in {other.file.name}", str(path)))
        else:
            found.entries[entry.name] = entry
    return header


def _read_shard(index: Path, file: str, names: list[str], weight_map: Mapping[str, str], found: IndexedTensors) -> None:
    first = f"tensor {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    path = inside_folder(index.parent, file)
    if path is None:
        found.findings.append(Finding(f"{first}: file {file!r:.200} is not inside the folder", str(index)))
        return
    if not path.exists():
        found.findings.append(Finding(f"file {file!r:.200} of {first} is missing", str(index)))
        return
    header = add_shard(path, found)
    if header is None:
        return
    held = {entry.name for entry in header.entries}
    found.findings.extend(
        Finding(f"tensor {name!r} is not in {file!r:.200}, where the index says it is", str(index))
        for name in names
        if name not in held
    )
    for entry in header.entries:
        if entry.name not in weight_map:
            found.findings.append(Finding(f"tensor {entry.name!r} is not in the index", str(path)))
        elif weight_map[entry.name] != file and found.entries[entry.name].file == path:
            found.findings.append(
                Finding(f"tensor {entry.name!r} is here, but the index says {weight_map[entry.name]!r:.200}", str(path))
            )


def _check_total(metadata: object, index: Path, found: IndexedTensors) -> None:
    if metadata is None:
        return
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or isinstance(total, bool) or not isinstance(total, int | float | None):
        found.findings.append(Finding("metadata.total_size is not a number", str(index)))
        return
    held = sum(entry.nbytes for entry in found.entries.values())
    if total is not None and total != held and not found.findings:
        found.findings.append(Finding(f"total_size is {total}, the tensors take {held} bytes", str(index)))


def _unlisted_shards(index: Path, names_of: Mapping[str, list[str]], found: IndexedTensors) -> None:
    stem = index.name.removesuffix(".safetensors.index.json")
    for path in sorted(index.parent.glob(f"{stem}-*-of-*.safetensors")):
        if path.name not in names_of:
            found.findings.append(Finding(f"shard {path.name} is not in the index", str(index)))
