"""Converting a model on disk from one naming scheme to another, as one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import Finding, UsageError
from rlctl.keys.architectures import architecture
from rlctl.keys.carried_files import carry_files
from rlctl.keys.compose import compose
from rlctl.keys.containers import TRACKER, open_container, write_sidecar
from rlctl.keys.layout import Layout
from rlctl.keys.opened import Opened, open_model
from rlctl.keys.output_folder import OutputFolder
from rlctl.keys.plan import Plan, PlanError
from rlctl.keys.schemes.hf import fused_layout, hf_layout
from rlctl.keys.schemes.megatron import Grid, megatron_layout
from rlctl.keys.shapes import stays_float32
from rlctl.keys.sinks import MegatronSink, SafetensorsSink, Sink, shard_layout
from rlctl.keys.stored_tensors import StoredTensors

TARGETS = ("hf", "hf-fused", "megatron", "vllm")
Advance = Callable[[float], None]


@dataclass(frozen=True)
class Conversion:
    """What is asked for.

    Args:
        source: a folder or file with a model.
        to: one of ``TARGETS``.
        scheme: the source's scheme, or ``auto``.
        base: a folder with the config.json, where the source has none.
        dtype: safetensors code to cast floating-point tensors to, or None.
        tp, pp, ep: tensor-, pipeline- and expert-parallel sizes of a Megatron target, 1 when None; for another target
            those of a Megatron source that does not say its own.
        modules: ``te`` or ``local``, how a Megatron target names its modules.
        vocab_multiple: Megatron's ``make_vocab_size_divisible_by``.
        max_shard_bytes: limit of a shard, or None for the source's own shards where they fit, else 5 GiB.
        drop_unknown: leave tensors of unknown names out instead of refusing.
    """

    source: Path
    to: str
    scheme: str = "auto"
    base: Path | None = None
    dtype: str | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    modules: str = "te"
    vocab_multiple: int = 128
    max_shard_bytes: int | None = None
    drop_unknown: bool = False

    @property
    def grid(self) -> Grid:
        """How a Megatron target is cut."""
        return Grid(self.tp or 1, self.pp or 1, self.ep or 1, self.modules, self.vocab_multiple)


@dataclass
class Prepared:
    """A conversion that was planned: what is there, what will be written, and all that stands in the way."""

    conversion: Conversion
    opened: Opened
    plan: Plan

    @property
    def findings(self) -> list[Finding]:
        """Every fault of the files, the names and the plan."""
        return [*self.opened.findings, *self.plan.findings]

    @property
    def notes(self) -> list[str]:
        """What a user should know but that stands in nobody's way."""
        return [*self.opened.notes, *self.plan.notes]

    @property
    def nbytes(self) -> int:
        """Bytes of all targets."""
        return sum(move.nbytes for move in self.plan.moves)

    def check(self) -> None:
        """Raise PlanError when anything stands in the way."""
        if self.findings:
            where = f"cannot convert {self.conversion.source} from {self.plan.source_scheme} to {self.conversion.to}"
            raise PlanError(where, self.findings)

    def document(self) -> dict[str, Any]:
        """Return what a report says of the plan."""
        return {
            "source": str(self.conversion.source),
            "source_scheme": self.plan.source_scheme,
            "source_container": self.opened.container.kind,
            "target_scheme": self.plan.target_scheme,
            "recognised": self.opened.why,
            "model_type": self.opened.spec.model_type,
            "counts": self.plan.counts,
            "dropped": [{"name": str(one.source), "reason": one.reason} for one in self.plan.dropped],
            "unknown": [str(ref) for ref in self.plan.unknown],
            "findings": [{"message": f.message, "where": f.where, "fix": f.fix} for f in self.findings],
            "notes": self.notes,
            "bytes": self.nbytes,
        }


def prepare(conversion: Conversion) -> Prepared:
    """Open the source, recognise it and plan the conversion; nothing is written and no tensor is read.

    Raises UsageError for what cannot be planned at all; everything else is in ``findings``.
    """
    if conversion.to not in TARGETS:
        raise UsageError(f"unknown target {conversion.to!r}", where="--to", fix=f"known: {', '.join(TARGETS)}")
    sizes: dict[str, int | None] = {}
    if conversion.to != "megatron":
        sizes = {"tp": conversion.tp, "pp": conversion.pp, "ep": conversion.ep}
    opened = open_model(conversion.source, scheme=conversion.scheme, base=conversion.base, sizes=sizes)
    target = target_layout(conversion, opened)
    keep = frozenset(name for name in opened.shapes if stays_float32(name))
    plan = compose(
        opened.layout,
        target,
        opened.tensors.infos,
        dtype=conversion.dtype,
        keep_dtype=keep,
        renamed=opened.raw,
        drop_unknown=conversion.drop_unknown,
    )
    return Prepared(conversion, opened, plan)


def target_layout(conversion: Conversion, opened: Opened) -> Layout:
    """Return what the target stores. Raises UsageError when the architecture has no such form."""
    spec, shapes = opened.spec, opened.shapes
    architecture(spec, conversion.to)
    if conversion.to == "megatron":
        return megatron_layout(spec, shapes, conversion.grid)
    if conversion.to == "hf-fused":
        return fused_layout(spec, shapes)
    layout = hf_layout(spec, shapes)
    return layout if conversion.to == "hf" else Layout(conversion.to, layout.stored, layout.drops)


def write(
    prepared: Prepared,
    target: Path,
    *,
    overwrite: bool = False,
    check: bool = False,
    advance: Advance = lambda _: None,
) -> dict[str, Any]:
    """Run a planned conversion into the folder ``target``, which appears whole or not at all.

    Args:
        prepared: from ``prepare``.
        target: the folder to make.
        overwrite: replace a checkpoint that is there.
        check: read the output again and compare every element with the plan.
        advance: told of bytes as they are done; with ``check`` each byte counts twice.

    Returns the report: ``prepared.document()`` with ``target``, ``seconds``, ``verified``, ``files``. Raises PlanError
    when anything stands in the way or does not hold, UsageError and OutputError for the target folder.
    """
    from rlctl.keys.execute import execute, verify  # not before there is something to do: it loads torch

    prepared.check()
    start = time.monotonic()
    opened, plan = prepared.opened, prepared.plan
    with (
        OutputFolder(
            target, overwrite=overwrite, sources=[opened.container.path], expected_bytes=prepared.nbytes
        ) as folder,
        opened.tensors as source,
    ):
        sink = _sink(prepared, folder.path)
        try:
            execute(plan, source, sink, advance=advance)
        finally:
            sink.close()
        carried = carry_files(opened.config_folder, folder.path)
        if check:
            with _written(folder.path) as written:
                verify(plan, source, written, advance=advance)
    return {
        **prepared.document(),
        "target": str(target),
        "verified": check,
        "files": carried,
        "seconds": time.monotonic() - start,
    }


def _sink(prepared: Prepared, folder: Path) -> Sink:
    conversion, plan = prepared.conversion, prepared.plan
    if conversion.to != "megatron":
        return SafetensorsSink(folder, shard_layout(plan, prepared.opened.tensors, conversion.max_shard_bytes))
    grid, spec = conversion.grid, prepared.opened.spec
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


def _written(folder: Path) -> StoredTensors:
    container = open_container(folder)
    if container.findings:
        raise PlanError("the output is damaged", container.findings)
    return StoredTensors.of(container.tensors)
