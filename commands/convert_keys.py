"""``rlctl convert-keys``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.errors import UsageError
from rlctl.keys.convert import Conversion, Prepared, prepare
from rlctl.keys.dtypes import parse_dtype
from rlctl.keys.inspect import Inspection, inspect
from rlctl.report import Report
from rlctl.units import format_bytes, format_duration, parse_bytes

EXAMPLES = {
    "rlctl convert-keys qwen2 qwen2-mg --to megatron --tp 2": "a Hugging Face folder as Megatron rank folders",
    "rlctl convert-keys qwen2-mg qwen2-again --to hf --verify": "and back, each element compared",
    "rlctl convert-keys fsdp-step-100 --to hf --base qwen2 --dry-run": "what a sharded checkpoint would become",
    "rlctl convert-keys qwen2 merged --to hf --adapter lora --merge": "an adapter folded into its base",
    "rlctl convert-keys --inspect lora --base qwen2": "what is in a folder, and what would do nothing",
}

Target = Literal["hf", "hf-fused", "megatron", "vllm", "peft", "vllm-lora"]


def main(
    report: Report,
    source: Annotated[Path | None, typer.Argument(metavar="SRC", help="Folder or file with the model.")] = None,
    target: Annotated[Path | None, typer.Argument(metavar="DST", help="Folder to make.")] = None,
    to: Annotated[Target | None, typer.Option("--to", help="Scheme to write.")] = None,
    from_: Annotated[str, typer.Option("--from", help="Scheme of SRC; auto tells it by the names.")] = "auto",
    base: Annotated[
        Path | None, typer.Option("--base", help="Base model of an adapter, or the config.json that SRC lacks.")
    ] = None,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="Adapter to merge, or its configuration.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Fold the adapter into the weights.")] = False,
    untie: Annotated[bool, typer.Option("--untie", help="Untie the head where merging needs it.")] = False,
    base_is_moved: Annotated[
        bool, typer.Option("--base-is-moved", help="The base is the one that PiSSA and its kin changed.")
    ] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Cast weights, for example bf16.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel size of Megatron folders.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline-parallel size.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, help="Expert-parallel size.")] = None,
    megatron_modules: Annotated[
        Literal["te", "local"],
        typer.Option("--megatron-modules", help="Module names of Transformer Engine or of Megatron itself."),
    ] = "te",
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Largest shard, for example 5GiB.")
    ] = None,
    map_file: Annotated[
        Path | None, typer.Option("--map", metavar="FILE", help="YAML rules for names that no scheme knows.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read the output again and compare.")] = False,
    strict: Annotated[
        bool | None,
        typer.Option(
            "--strict/--no-strict",
            show_default=False,
            help="Make warnings errors; --no-strict leaves unknown tensors out.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at DST.")] = False,
    inspect_path: Annotated[
        Path | None, typer.Option("--inspect", metavar="PATH", help="Say what is at PATH, and stop.")
    ] = None,
) -> None:
    """Convert the names and layouts of a model's weights.

    Reads Hugging Face folders with experts apart or stacked, FSDP and torch.distributed.checkpoint output, files of
    each rank's DTensors, Megatron-core checkpoints, models inside PEFT, adapters and vLLM's own parameters. Nothing is
    written unless every name has its place; see docs/convert-keys.md.
    """
    if inspect_path is not None:
        _inspect(report, inspect(inspect_path, base=base))
        return
    if source is None or to is None:
        missing = "SRC" if source is None else "--to"
        raise UsageError(f"{missing} is missing", fix="see rlctl convert-keys --help")
    if target is None and not dry_run:
        raise UsageError("DST is missing", fix="give the folder to make, or --dry-run")
    prepared = prepare(
        Conversion(
            source,
            to,
            scheme=from_,
            base=base,
            dtype=parse_dtype(dtype, where="--dtype") if dtype else None,
            tp=tp,
            pp=pp,
            ep=ep,
            modules=megatron_modules,
            max_shard_bytes=_size(max_shard_size),
            drop_unknown=strict is False,
            adapter=adapter,
            merge=merge,
            untie=untie,
            base_is_moved=base_is_moved,
            map_file=map_file,
        )
    )
    _announce(report, prepared, strict=bool(strict))
    if dry_run:
        _show_plan(report, prepared)
        return
    assert target is not None
    total = prepared.nbytes * (2 if verify else 1)
    with report.progress("converting", total, unit="bytes") as progress:
        result = prepared.write(target, overwrite=overwrite, verify=verify, advance=progress.advance)
    report.document(result)
    report.table(["what", "tensors"], list(result["counts"].items()))
    _show_dropped(report, prepared)
    checked = ", verified" if verify else ""
    took = f"{format_bytes(result['bytes'])} in {format_duration(result['seconds'])}{checked}"
    report.text(f"{result['source_scheme']} -> {result['target_scheme']}: {took}, in {target}")


def _announce(report: Report, prepared: Prepared, *, strict: bool) -> None:
    """Say what was recognised and what is odd; end here, with the document, when something stands in the way."""
    for reason in prepared.why:
        report.line(f"recognised: {reason}")
    for note in prepared.notes:
        report.line(f"note: {note}")
    for warning in prepared.warnings:
        report.warn(warning)
    if prepared.findings or (strict and prepared.warnings):
        report.document(prepared.document())
        prepared.check(strict=strict)


def _show_plan(report: Report, prepared: Prepared) -> None:
    report.document({**prepared.document(), "moves": list(prepared.rows())})
    rows = [
        [_names(row["sources"]), row["target"], "x".join(map(str, row["shape"])) or "scalar", row["dtype"],
         " ".join(row["transforms"])]
        for row in prepared.rows()
    ]  # fmt: skip
    report.table(["source", "target", "shape", "dtype", "transform"], rows)
    if prepared.dropped:
        report.table(["dropped", "why"], prepared.dropped)
    counts = ", ".join(f"{count} {what}" for what, count in prepared.counts.items() if count)
    report.text(f"{counts}; {format_bytes(prepared.nbytes)} would be written")


def _show_dropped(report: Report, prepared: Prepared) -> None:
    reasons = Counter(reason.partition(" (")[0] for _, reason in prepared.dropped)
    for reason, count in reasons.items():
        report.text(f"dropped {count}: {reason}")


def _inspect(report: Report, found: Inspection) -> None:
    report.document(found.document())
    what = f"{found.kind}, {found.scheme or 'scheme unknown'}, {found.model_type or 'model unknown'}"
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items())
    report.text(f"{found.path}: {what}")
    report.text(f"{found.tensors} tensors ({kinds}), {format_bytes(found.nbytes)} in {found.files} files")
    for reason in found.why:
        report.text(f"recognised: {reason}")
    if found.adapter and "modules" in found.adapter:
        rows = [[m["path"], m["kind"], m["rank"], m["alpha"], m["scaling"]] for m in found.adapter["modules"]]
        report.table(["module", "kind", "rank", "alpha", "scaling"], rows)
    for note in found.notes:
        report.text(f"note: {note}")
    found.check()


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise UsageError(str(error), where="--max-shard-size") from error
    if size < 1:
        raise UsageError("a shard of 0 bytes can hold nothing", where="--max-shard-size")
    return size


def _names(sources: list[str]) -> str:
    return f"{sources[0]} and {len(sources) - 1} more" if len(sources) > 1 else "".join(sources)
