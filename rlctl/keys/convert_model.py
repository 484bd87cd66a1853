"""Converting a model on disk from one naming scheme to another, with or without merging an adapter on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.errors import Finding, UsageError
from rlctl.keys.ahead import one_thread
from rlctl.keys.architectures import architecture
from rlctl.keys.carried_files import carry_model_files
from rlctl.keys.checkpoint import is_adapter
from rlctl.keys.compose import compose
from rlctl.keys.containers import TRACKER, open_container, write_sidecar
from rlctl.keys.conversion import Advance, Conversion, Prepared
from rlctl.keys.layout import Layout, Ref, alone, layout
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.mapped_model import open_mapped
from rlctl.keys.merging import Merge, MergedTensors, adapter_in_model, plan_merge
from rlctl.keys.opened import Opened, open_model
from rlctl.keys.output_folder import OutputFolder
from rlctl.keys.plan import Plan, PlanError
from rlctl.keys.schemes.hf import canonical_shapes, fused_layout, hf_layout
from rlctl.keys.schemes.megatron import megatron_layout
from rlctl.keys.schemes.vllm_names import vllm_names_layout
from rlctl.keys.shapes import stays_float32
from rlctl.keys.sinks import MegatronSink, SafetensorsSink, Sink, shard_layout
from rlctl.keys.stored_tensors import StoredTensors


@dataclass
class PreparedModel(Prepared):
    """A planned conversion of a whole model."""

    conversion: Conversion
    opened: Opened
    plan: Plan
    merge: Merge | None = None

    @property
    def source_scheme(self) -> str:
        return self.plan.source_scheme

    @property
    def why(self) -> list[str]:
        return self.opened.why

    @property
    def findings(self) -> list[Finding]:
        return [*self.opened.findings, *self.plan.findings]

    @property
    def notes(self) -> list[str]:
        return [*self.opened.notes, *self.plan.notes, *(self.merge.notes if self.merge else ())]

    @property
    def warnings(self) -> list[str]:
        return [*self.opened.warnings, *(str(finding) for finding in (self.merge.zero_hits() if self.merge else ()))]

    @property
    def counts(self) -> dict[str, int]:
        return self.plan.counts

    @property
    def dropped(self) -> list[tuple[str, str]]:
        return [(str(one.source), one.reason) for one in self.plan.dropped]

    @property
    def nbytes(self) -> int:
        return sum(move.nbytes for move in self.plan.moves)

    @property
    def sources(self) -> list[Path]:
        """Every folder and file that is read."""
        merged = [self.merge.where] if self.merge else []
        return list(dict.fromkeys([self.conversion.source, self.opened.container.path, *merged]))

    def rows(self) -> Iterator[dict[str, Any]]:
        return self.plan.rows()

    def document(self) -> dict[str, Any]:
        return {
            **super().document(),
            "source_container": self.opened.container.kind,
            "model_type": self.opened.spec.model_type if self.opened.spec else None,
            "unknown": [str(ref) for ref in self.plan.unknown],
        }

    def write(
        self,
        target: Path,
        *,
        overwrite: bool = False,
        verify: bool = False,
        durable: bool = True,
        advance: Advance = lambda _: None,
    ) -> dict[str, Any]:
        from rlctl.keys import execute  # not before there is something to do: it loads torch

        self.check()
        start = time.monotonic()
        plan, source = self.plan, self.opened.tensors
        with (
            OutputFolder(
                target, overwrite=overwrite, sources=self.sources, expected_bytes=self.nbytes, durable=durable
            ) as folder,
            source,
        ):
            sink = _sink(self, folder.path)
            try:
                with one_thread():
                    execute.execute(plan, source, sink, advance=advance)
                if isinstance(source, MergedTensors):
                    source.finish()
            finally:
                sink.close()
            untied = self.merge is not None and self.merge.plan.unties
            carried = carry_model_files(self.opened.config_folder, folder.path, untied=untied)
            if verify:
                with written_tensors(folder.path) as written, one_thread():
                    execute.verify(plan, source, written, advance=advance)
        seconds = time.monotonic() - start
        return {**self.document(), "target": str(target), "verified": verify, "files": carried, "seconds": seconds}


def prepare_model(conversion: Conversion) -> PreparedModel:
    """Open the source, recognise it and plan the conversion; nothing is written and no tensor is read.

    Raises UsageError for what cannot be planned at all; everything else is in ``findings``.
    """
    sizes: dict[str, int | None] = {}
    if conversion.to != "megatron":
        sizes = {"tp": conversion.tp, "pp": conversion.pp, "ep": conversion.ep}
    path = model_path(conversion)
    if conversion.map_file is not None:
        opened = open_mapped(path, conversion.map_file, base=conversion.base)
    else:
        opened = open_model(path, scheme=conversion.scheme, base=conversion.base, sizes=sizes)
    merge = _plan_merge(conversion, opened)
    keep = frozenset(name for name in opened.shapes if stays_float32(name))
    plan = compose(
        opened.layout,
        target_layout(conversion, opened),
        opened.tensors.infos,
        dtype=conversion.dtype,
        keep_dtype=keep,
        renamed=opened.raw,
        drop_unknown=conversion.drop_unknown,
        merged=len(merge.plan.changes) + (merge.plan.new_head is not None) if merge else 0,
    )
    return PreparedModel(conversion, opened, plan, merge)


def model_path(conversion: Conversion) -> Path:
    """Return where the model lies: at the source, or beside an adapter that is the source."""
    if not is_adapter(conversion.source):
        return conversion.source
    if not conversion.merge:
        fix = "--to peft or vllm-lora, or --merge with --base"
        raise UsageError("is an adapter, not a model", where=str(conversion.source), fix=fix)
    if conversion.base is None:
        raise UsageError("the base to merge into is missing", where="--base", fix="give the folder of the base model")
    return conversion.base


def adapter_folder(conversion: Conversion) -> Path:
    """Return where the adapter to merge lies. Raises UsageError when none is given."""
    folder = conversion.source if model_path(conversion) != conversion.source else conversion.adapter
    if folder is None:
        raise UsageError("there is nothing to merge", where="--merge", fix="give the adapter's folder with --adapter")
    return folder


def _plan_merge(conversion: Conversion, opened: Opened) -> Merge | None:
    """Plan the merge that is asked for, and make ``opened`` what the model is after it."""
    if not conversion.merge:
        if opened.adapter:
            fix = "--merge to fold the adapter in, or --to peft to export it"
            raise UsageError(f"holds {len(opened.adapter)} adapter tensors", where=str(conversion.source), fix=fix)
        if conversion.adapter is not None:
            raise UsageError("an adapter is given, but not what to do with it", where="--adapter", fix="add --merge")
        return None
    if opened.scheme not in ("hf", "hf-fused"):
        fix = "convert the base to hf first"
        raise UsageError(f"cannot merge into a base in {opened.scheme} form", where=str(opened.container.path), fix=fix)
    if opened.adapter:
        adapter, where = adapter_in_model(opened.adapter, opened.container, conversion.adapter), conversion.source
    else:
        where = adapter_folder(conversion)
        adapter = Adapter.open(where)
    merge = plan_merge(
        adapter, where, opened.tensors, opened.known, base_is_moved=conversion.base_is_moved, untie=conversion.untie
    )
    opened.tensors = MergedTensors(opened.tensors, merge, conversion.dtype)
    if merge.plan.unties:
        opened.spec = replace(opened.known, tied=False)
        opened.shapes = canonical_shapes(opened.spec, mtp=opened.mtp)
        form = hf_layout if opened.scheme == "hf" else fused_layout
        opened.layout = form(opened.spec, opened.shapes)
    return merge


def target_layout(conversion: Conversion, opened: Opened) -> Layout:
    """Return what the target stores. Raises UsageError when the architecture has no such form."""
    if opened.spec is None and conversion.to == "hf":
        return layout("hf", [alone(Ref(name), name, shape) for name, shape in opened.shapes.items()])
    spec, shapes = opened.known, opened.shapes
    architecture(spec, conversion.to)
    if opened.quantised and conversion.to not in ("hf", "vllm"):
        fix = "give a checkpoint in bf16"
        raise UsageError(f"fp8 blocks have no place in the {conversion.to} form", where="--to", fix=fix)
    if conversion.to == "megatron":
        return megatron_layout(spec, shapes, conversion.grid)
    if conversion.to == "hf-fused":
        return fused_layout(spec, shapes)
    return hf_layout(spec, shapes) if conversion.to == "hf" else vllm_names_layout(spec, shapes)


def _sink(prepared: PreparedModel, folder: Path) -> Sink:
    conversion, plan = prepared.conversion, prepared.plan
    if conversion.to != "megatron":
        return SafetensorsSink(folder, shard_layout(plan, prepared.opened.tensors, conversion.max_shard_bytes))
    grid, spec = conversion.grid, prepared.opened.known
    # Megatron-LM loads an iteration called "release" as weights alone, without an optimizer's state.
    (folder / TRACKER).write_text("release", encoding="utf-8")
    write_sidecar(
        folder,
        {
            "format": 1,
            "tp": grid.tp,
            "pp": grid.pp,
            "ep": grid.ep,
            "modules": grid.flavour,
            "vocab_size": spec.vocab,
            "padded_vocab_size": grid.vocab_rows(spec.vocab),
        },
    )
    return MegatronSink(folder / "release", plan)


def written_tensors(folder: Path) -> StoredTensors:
    """Return the tensors of an output that was just written. Raises PlanError when its files are not sound."""
    container = open_container(folder)
    if container.findings:
        raise PlanError("the output is damaged", container.findings)
    return StoredTensors.of(container.tensors)
