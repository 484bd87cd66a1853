"""Whatever holds a model's tensors, opened by what lies at a path; names are as the files have them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.errors import Finding, UsageError
from rlctl.keys.boxes import whole
from rlctl.keys.dcp import is_dcp
from rlctl.keys.json_file import read_object
from rlctl.keys.layout import Ref
from rlctl.keys.pickled import Record
from rlctl.keys.pieces import Piece, PiecedTensor
from rlctl.keys.stored_tensor import StoredTensor
from rlctl.keys.tensor_file import TensorEntry, read_whole
from rlctl.keys.tensor_source import open_tensors
from rlctl.keys.torch_file import FOREIGN, read_torch_file, tensors_in

SIDECAR = "rlctl_megatron.json"
TRACKER = "latest_checkpointed_iteration.txt"
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?")
_ITERATION = re.compile(r"iter_\d{7}|release")
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


@dataclass
class Container:
    """Opened files.

    Args:
        kind: ``file``, ``model``, ``adapter``, ``dcp``, ``rank-files``, ``torch-file`` or ``megatron``.
        path: what was opened.
        tensors: every tensor, by name and rank folder.
        config_folders: where a config.json that belongs to it may lie, nearest first.
        why: what the kind was told by.
        sizes: ``tp``, ``pp``, ``ep`` as far as the files state them, with the place that does.
        facts: the rest of what its own description says.
        findings: faults of the files.
        notes: what is left aside.
    """

    kind: str
    path: Path
    tensors: dict[Ref, TensorEntry | PiecedTensor]
    config_folders: list[Path]
    why: str
    sizes: dict[str, tuple[int, str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def open_container(path: Path) -> Container:
    """Open what lies at ``path``. Raises UsageError when it is nothing known or not one thing."""
    if path.is_dir():
        folder = _iteration(path)
        if folder is not None:
            return _megatron(path, folder)
    source = open_tensors(path)
    source.close()
    tensors = {Ref(name): entry for name, entry in source.entries.items()}
    assert all(isinstance(entry, TensorEntry | PiecedTensor) for entry in tensors.values())
    home = path if path.is_dir() else path.parent
    why = {
        "dcp": ".metadata describes a torch.distributed.checkpoint folder",
        "rank-files": "one file a rank, put together by the placements of its DTensors",
        "torch-file": "a file that torch.save wrote",
        "file": "a safetensors file",
    }.get(source.kind, "a folder of safetensors")
    return Container(
        source.kind,
        path,
        tensors,  # type: ignore[arg-type]  # asserted above
        [home, home / "huggingface"],
        why,
        findings=list(source.findings),
    )


def _iteration(path: Path) -> Path | None:
    """Return the folder of one Megatron iteration at or below ``path``, or None when there is none."""
    if any(_RANK_FOLDER.fullmatch(child.name) for child in path.iterdir()):
        return path
    inside = sorted(child for child in path.iterdir() if child.is_dir() and _ITERATION.fullmatch(child.name))
    tracker = path / TRACKER
    if not inside and not tracker.exists():
        return None
    if tracker.exists():
        text = read_whole(tracker, limit=1000).decode("utf-8", "replace").strip()[:40]
        name = f"iter_{int(text):07d}" if text.isdecimal() else text
        if path / name not in inside:
            raise UsageError(f"names {name!r}, which is not there", where=str(tracker))
        return path / name
    if len(inside) != 1:
        raise UsageError(
            f"holds {len(inside)} iterations and no {TRACKER}",
            where=str(path),
            fix=f"name one of {', '.join(child.name for child in inside[:8])}",
        )
    return inside[0]


def _megatron(path: Path, folder: Path) -> Container:
    homes = list(dict.fromkeys([path, folder, path.parent if _ITERATION.fullmatch(path.name) else path]))
    if is_dcp(folder):
        container = open_container(folder)
        container.path, container.config_folders = path, homes
        container.why = f"{folder.name}/.metadata: a Megatron torch_dist checkpoint"
        return container
    ranks = sorted(child for child in folder.iterdir() if _RANK_FOLDER.fullmatch(child.name))
    found = Container("megatron", path, {}, homes, f"rank folders {ranks[0].name} to {ranks[-1].name}")
    _read_sidecar(homes, found)
    for rank in ranks:
        _read_rank(rank, found)
    _sizes_from_names([rank.name for rank in ranks], found)
    return found


def _read_sidecar(homes: list[Path], found: Container) -> None:
    for home in homes:
        if (home / SIDECAR).exists():
            found.facts = read_object(home / SIDECAR)
            for size in _SIZES:
                value = found.facts.get(size)
                if type(value) is int and value > 0:
                    found.sizes[size] = (value, SIDECAR)
            return


def _read_rank(rank: Path, found: Container) -> None:
    files = sorted(file for file in rank.iterdir() if file.name in ("model_optim_rng.pt", "model_rng.pt"))
    if len(files) != 1:
        names = ", ".join(sorted(file.name for file in rank.iterdir())[:6])
        found.findings.append(Finding(f"no model_optim_rng.pt; it holds {names or 'nothing'}", str(rank)))
        return
    content = read_torch_file(files[0], foreign=FOREIGN)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        fix = None
        if isinstance(content, dict) and "model0" in content:
            fix = "virtual pipeline stages (model0, model1, ...) are not read: save it again without them"
        found.findings.append(Finding("holds no 'model' state dict", str(files[0]), fix))
        return
    for name, tensor in tensors_in(content["model"], where=str(files[0])):
        if not isinstance(tensor, StoredTensor):
            found.findings.append(
                Finding("is a DTensor; Megatron FSDP checkpoints are not read", f"{rank.name}:{name}")
            )
            continue
        piece = Piece(whole(tensor.shape), tensor.file, tensor)
        found.tensors[Ref(name, rank.name)] = PiecedTensor(name, tensor.dtype, tensor.shape, (piece,))
    arguments = content.get("args")
    if isinstance(arguments, Record):
        for size, key in _SIZES.items():
            value = arguments.get(key)
            if type(value) is int and value > 0:
                found.sizes.setdefault(size, (value, f"args.{key}"))
    rest = sorted(set(map(str, content)) - {"model", "args", "checkpoint_version", "iteration"})
    if rest and not found.notes:
        found.notes.append(f"left aside in every rank file: {', '.join(rest[:6])}")


def _sizes_from_names(names: list[str], found: Container) -> None:
    """Tell sizes by folder names, as far as they say: two numbers may be tensor and pipeline, or tensor and expert."""
    numbers = [[int(n) for n in match.groups() if n is not None] for n in names if (match := _RANK_FOLDER.fullmatch(n))]
    widths = {len(one) for one in numbers}
    if len(widths) != 1:
        found.findings.append(Finding(f"rank folders of different kinds: {names[0]} and {names[-1]}", str(found.path)))
        return
    counts = [max(column) + 1 for column in zip(*numbers, strict=True)]
    found.sizes.setdefault("tp", (counts[0], "the folder names"))
    if len(counts) == 3:
        found.sizes.setdefault("pp", (counts[1], "the folder names"))
        found.sizes.setdefault("ep", (counts[2], "the folder names"))
    elif len(counts) == 1:
        found.sizes.setdefault("pp", (1, "the folder names"))
        found.sizes.setdefault("ep", (1, "the folder names"))
    else:
        found.facts["second"] = counts[1]


def write_sidecar(folder: Path, facts: dict[str, Any]) -> None:
    """Write what cannot be told from a Megatron checkpoint's files into ``folder``."""
    (folder / SIDECAR).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
