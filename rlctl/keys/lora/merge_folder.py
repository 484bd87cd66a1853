"""An adapter folded into a Hugging Face folder on disk, at the speed of copying it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import UsageError
from rlctl.keys.ahead import DEPTH, ahead, one_thread
from rlctl.keys.carried_files import carry_files
from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.families import Experts, known_model_types
from rlctl.keys.layout import TensorInfo
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.merge import Merger
from rlctl.keys.lora.merge_plan import HEAD, MergePlan, plan_merge
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.output_folder import OutputFolder
from rlctl.keys.shard_layout import ShardLayout, TensorShape, plan_groups
from rlctl.keys.shard_writer import ShardWriter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MergeReport:
    """What was written: merged tensors, copied ones, bytes, and what a user should know."""

    merged: int
    copied: int
    nbytes: int
    notes: tuple[str, ...]


def merge_folder(
    base: Path | str,
    adapter: Path | str,
    target: Path | str,
    *,
    overwrite: bool = False,
    base_is_moved: bool = False,
    untie: bool = False,
    durable: bool = True,
) -> MergeReport:
    """Write the merged model to folder ``target``, in the base's shards and dtypes; the base stays as it is.

    Untouched tensors are copied inside the kernel; the others pass one at a time through one buffer of the largest
    size. Configuration and tokenizer go along. The folder appears whole or not at all.

    Raises UsageError, CheckError or their kin when the adapter does not fit the base or nothing would be merged.
    """
    with Checkpoint.open(base) as source, Adapter.open(adapter) as opened:
        source.check()
        if source.kind != "model":
            raise UsageError("is no folder of a model", where=str(base))
        moe, tied = base_facts(source.config, str(base))
        shapes = {name: entry.shape for name, entry in source.entries.items()}
        plan = plan_merge(
            opened.contents, opened.config, shapes, moe=moe, tied=tied, base_is_moved=base_is_moved, untie=untie
        )
        layout = _layout(source, plan)
        sources = [Path(base), Path(adapter)]
        with OutputFolder(
            target, overwrite=overwrite, sources=sources, expected_bytes=layout.nbytes, durable=durable
        ) as folder:
            with ShardWriter(folder.path, layout) as writer, one_thread():
                copied = _write(source, opened, plan, writer)
            _carry(Path(base), folder.path, source.config, plan)
        notes = list(opened.config.notes)
        if opened.contents.stripped:
            notes.append(f"{opened.contents.stripped} keys stripped of wrapper segments")
        return MergeReport(len(shapes) - copied, copied, layout.total_size, tuple(notes))


def base_facts(config: Mapping[str, Any], where: str) -> tuple[Experts | None, bool | None]:
    """Return how the base of this config.json keeps its experts, and whether it ties its head (None: not said)."""
    if config.get("model_type") in known_model_types():
        spec = ModelSpec.from_config(config, where=where)
        return spec.moe, spec.tied
    tied = config.get("tie_word_embeddings")
    return None, tied if isinstance(tied, bool) else None


def _layout(source: Checkpoint, plan: MergePlan) -> ShardLayout:
    groups: dict[Path, list[TensorShape]] = {}
    for entry in source.entries.values():
        groups.setdefault(entry.file, []).append(TensorShape(entry.name, entry.dtype, entry.shape))
        if plan.new_head is not None and entry.name == plan.embedding:
            groups[entry.file].append(TensorShape(HEAD, entry.dtype, entry.shape))
    return plan_groups(list(groups.values()))


def _write(source: Checkpoint, adapter: Adapter, plan: MergePlan, writer: ShardWriter) -> int:
    """Write every tensor; return how many were copied."""
    untouched = [(name, entry) for name, entry in source.entries.items() if not plan.touches(name)]
    writer.copy(untouched)
    merger = Merger(adapter, plan)
    if plan.new_head is not None:
        writer.write(HEAD, merger.head(source.tensor(plan.embedding)))
    with ThreadPoolExecutor(1) as pool:
        for name, pieces in groupby(ahead(_merged(source, merger, plan), pool), key=itemgetter(0)):
            writer.write_pieces(name, map(itemgetter(1), pieces))
    merger.finish()
    return len(untouched)


def _merged(source: Checkpoint, merger: Merger, plan: MergePlan) -> Iterator[tuple[str, Tensor]]:
    for name, entry in source.entries.items():
        if plan.touches(name):
            info = TensorInfo(entry.shape, entry.dtype)
            for piece in merger.pieces(name, info, partial(_read, source, name), ring=DEPTH + 1):
                yield name, piece


def _read(source: Checkpoint, name: str, first: int, out: Tensor) -> None:
    """Fill ``out`` with elements of a tensor, from index ``first`` on."""
    from rlctl.keys.tensor_values import tensor_bytes

    source.read_into(name, tensor_bytes(out), first * out.element_size())


def _carry(base: Path, target: Path, config: Mapping[str, Any], plan: MergePlan) -> None:
    if not plan.unties:
        carry_files(base, target)
        return
    carry_files(base, target, skip=frozenset({"config.json"}))
    text = json.dumps({**config, "tie_word_embeddings": False}, indent=2, ensure_ascii=False)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
