"""Merging an adapter into a model of an architecture that rlctl does not know: every tensor keeps its name and shape.

Names alone say where the adapter acts, so layers of any kind (linear attention, convolutions, vision towers) pass
through as bytes. Only adapters of stacked experts need to know the architecture, and are refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import Finding, UsageError
from rlctl.keys.ahead import one_thread
from rlctl.keys.boxes import whole
from rlctl.keys.carried_files import carry_model_files
from rlctl.keys.containers import Container, open_container
from rlctl.keys.conversion import Advance, Conversion, Prepared
from rlctl.keys.convert_model import adapter_folder, model_path, written_tensors
from rlctl.keys.families import known_model_types
from rlctl.keys.json_file import read_object
from rlctl.keys.layout import Ref
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.merge_plan import HEAD, plan_merge
from rlctl.keys.merging import Merge, MergedTensors
from rlctl.keys.model_spec import CONFIG_BYTES
from rlctl.keys.opened import TIED_NOTE
from rlctl.keys.output_folder import OutputFolder
from rlctl.keys.plan import Copy, Move, Plan
from rlctl.keys.shard_layout import ShardLayout, TensorShape, plan_groups
from rlctl.keys.stored_tensors import StoredTensors


@dataclass
class PreparedMerge(Prepared):
    """A planned merge by names.

    Args:
        conversion: what was asked for.
        container: the base's files.
        model_type: the base's, as its configuration says it.
        merge: the adapter and what it changes.
        tensors: the base's tensors as they are after the merge.
        plan: every tensor onto itself.
    """

    conversion: Conversion
    container: Container
    model_type: str
    merge: Merge
    tensors: MergedTensors
    plan: Plan

    @property
    def source_scheme(self) -> str:
        return "hf"

    @property
    def why(self) -> list[str]:
        return [self.container.why, f"model_type {self.model_type!r} is not known: merged by names alone"]

    @property
    def findings(self) -> list[Finding]:
        return self.container.findings

    @property
    def notes(self) -> list[str]:
        headless = not any(ref.name.endswith(HEAD) for ref in self.tensors.infos)
        return [*self.container.notes, *([TIED_NOTE] if headless else []), *self.merge.notes]

    @property
    def warnings(self) -> list[str]:
        return [str(finding) for finding in self.merge.zero_hits()]

    @property
    def counts(self) -> dict[str, int]:
        return self.plan.counts

    @property
    def dropped(self) -> list[tuple[str, str]]:
        return []

    @property
    def nbytes(self) -> int:
        return sum(move.nbytes for move in self.plan.moves)

    def rows(self) -> Iterator[dict[str, Any]]:
        return self.plan.rows()

    def write(
        self,
        target: Path,
        *,
        overwrite: bool = False,
        verify: bool = False,
        durable: bool = True,
        advance: Advance = lambda _: None,
    ) -> dict[str, Any]:
        from rlctl.keys import execute
        from rlctl.keys.sinks import SafetensorsSink

        self.check()
        start = time.monotonic()
        sources = [self.container.path, self.merge.where]
        with (
            OutputFolder(
                target, overwrite=overwrite, sources=sources, expected_bytes=self.nbytes, durable=durable
            ) as folder,
            self.tensors as tensors,
            one_thread(),
        ):
            sink = SafetensorsSink(folder.path, self._layout())
            try:
                execute.execute(self.plan, tensors, sink, advance=advance)
                tensors.finish()
            finally:
                sink.close()
            carried = carry_model_files(self.container.path, folder.path, untied=self.merge.plan.unties)
            if verify:
                with written_tensors(folder.path) as written:
                    execute.verify(self.plan, tensors, written, advance=advance)
        seconds = time.monotonic() - start
        return {**self.document(), "target": str(target), "verified": verify, "files": carried, "seconds": seconds}

    def _layout(self) -> ShardLayout:
        """Return the base's own shards, a new head beside the embedding."""
        groups: dict[Path, list[TensorShape]] = {}
        for move in self.plan.moves:
            name = self.merge.plan.embedding if move.target.name == HEAD and self._makes_head else move.target.name
            held = self.container.tensors[Ref(name)]
            file = getattr(held, "file", self.container.path)
            groups.setdefault(file, []).append(TensorShape(move.target.name, move.dtype, move.shape))
        return plan_groups(list(groups.values()))

    @property
    def _makes_head(self) -> bool:
        return self.merge.plan.new_head is not None


def is_merge_by_name(conversion: Conversion) -> bool:
    """Tell whether an adapter is to be merged into a Hugging Face model whose model_type is not known."""
    if not conversion.merge or conversion.to != "hf" or conversion.map_file is not None:
        return False
    config = model_path(conversion) / "config.json"
    if conversion.scheme not in ("auto", "hf") or not config.is_file():
        return False
    named = read_object(config, limit=CONFIG_BYTES).get("model_type")
    return isinstance(named, str) and named not in known_model_types()


def prepare_merge(conversion: Conversion) -> PreparedMerge:
    """Plan the merge; see ``rlctl.keys.convert.prepare``."""
    for option, value in (("--dtype", conversion.dtype), ("--max-shard-size", conversion.max_shard_bytes)):
        if value is not None:
            raise UsageError("needs a model_type that is known", where=option)
    path = model_path(conversion)
    container = open_container(path)
    if container.kind != "model":
        raise UsageError("is no Hugging Face folder of a model", where=str(path), fix=container.why)
    config = read_object(path / "config.json", limit=CONFIG_BYTES)
    tied = config.get("tie_word_embeddings")
    base = StoredTensors.of(container.tensors)
    where = adapter_folder(conversion)
    adapter = Adapter.open(where)
    made = plan_merge(
        adapter.contents,
        adapter.config,
        {ref.name: info.shape for ref, info in base.infos.items()},
        tied=tied if isinstance(tied, bool) else None,
        base_is_moved=conversion.base_is_moved,
        untie=conversion.untie,
    )
    merge = Merge(adapter, made, where)
    tensors = MergedTensors(base, merge, None)
    plan = Plan(
        "hf", "hf", tensors.infos, [_onto_itself(ref, tensors, merge) for ref in tensors.infos], merged=_merged(merge)
    )
    return PreparedMerge(conversion, container, str(config["model_type"]), merge, tensors, plan)


def _onto_itself(ref: Ref, tensors: MergedTensors, merge: Merge) -> Move:
    info = tensors.infos[ref]
    box = whole(info.shape)
    changed = merge.plan.touches(ref.name) or (merge.plan.new_head is not None and ref == Ref(HEAD))
    copy = Copy(ref, box, box, tuple(range(len(info.shape))))
    return Move(ref, info.shape, info.dtype, (copy,), ("merge",) if changed else ("copy",))


def _merged(merge: Merge) -> int:
    return len(merge.plan.changes) + (merge.plan.new_head is not None)
