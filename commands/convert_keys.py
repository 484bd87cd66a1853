"""``rlctl convert-keys``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.errors import Finding, UsageError
from rlctl.keys.convert import Conversion, Prepared, prepare, write
from rlctl.keys.dtypes import parse_dtype
from rlctl.keys.plan import PlanError
from rlctl.report import Report
from rlctl.units import format_bytes, format_duration, parse_bytes

EXAMPLES = {
    "rlctl convert-keys qwen2 qwen2-mg --to megatron --tp 2": "a Hugging Face folder as Megatron rank folders",
    "rlctl convert-keys qwen2-mg qwen2 --to hf --verify": "and back, each element compared",
    "rlctl convert-keys fsdp-step-100 model --to hf --base qwen2 --dry-run": "what a sharded checkpoint would become",
}

Target = Literal["hf", "hf-fused", "megatron", "vllm"]


def main(
    report: Report,
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder or file with the model.")],
    to: Annotated[Target, typer.Option("--to", help="Scheme to write.")],
    target: Annotated[Path | None, typer.Argument(metavar="DST", help="Folder to make.")] = None,
    from_: Annotated[str, typer.Option("--from", help="Scheme of SRC; auto tells it by the names.")] = "auto",
    base: Annotated[Path | None, typer.Option("--base", help="Folder with the config.json that SRC lacks.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Cast weights, for example bf16.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel size of a Megatron target.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline-parallel size.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, help="Expert-parallel size.")] = None,
    megatron_modules: Annotated[
        Literal["te", "local"],
        typer.Option("--megatron-modules", help="Module names of Transformer Engine or of Megatron itself."),
    ] = "te",
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Largest shard, for example 5GiB.")
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
) -> None:
    """Convert the names and layouts of a model's weights.

    Reads Hugging Face folders with experts apart or stacked, FSDP and torch.distributed.checkpoint output, files of
    each rank's DTensors, Megatron-core checkpoints and vLLM's own parameters. Nothing is written unless every name has
    its place; see docs/convert-keys.md.
    """
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
        )
    )
    for reason in prepared.opened.why:
        report.line(f"recognised: {reason}")
    for note in prepared.notes:
        report.warn(note)
    if prepared.findings or (strict and prepared.notes):
        _refuse(report, prepared, strict=bool(strict))
    if dry_run:
        _show_plan(report, prepared)
        return
    assert target is not None
    total = prepared.nbytes * (2 if verify else 1)
    with report.progress("converting", total, unit="bytes") as progress:
        result = write(prepared, target, overwrite=overwrite, check=verify, advance=progress.advance)
    report.document(result)
    report.table(["what", "tensors"], list(result["counts"].items()))
    for reason, count in Counter(one["reason"].partition(" (")[0] for one in result["dropped"]).items():
        report.text(f"dropped {count}: {reason}")
    checked = ", verified" if verify else ""
    seconds = format_duration(result["seconds"])
    schemes = f"{result['source_scheme']} -> {result['target_scheme']}"
    report.text(f"{schemes}: {format_bytes(result['bytes'])} in {seconds}{checked}, in {target}")


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


def _refuse(report: Report, prepared: Prepared, *, strict: bool) -> None:
    report.document(prepared.document())
    prepared.check()
    assert strict
    raise PlanError("warnings are errors under --strict", [Finding(note) for note in prepared.notes])


def _show_plan(report: Report, prepared: Prepared) -> None:
    report.document({**prepared.document(), "moves": list(prepared.plan.rows())})
    rows = [
        [_names(row["sources"]), row["target"], "x".join(map(str, row["shape"])) or "scalar", row["dtype"],
         " ".join(row["transforms"])]
        for row in prepared.plan.rows()
    ]  # fmt: skip
    rows += [[str(one.source), f"(dropped: {one.reason})", None, None, None] for one in prepared.plan.dropped]
    report.table(["source", "target", "shape", "dtype", "transform"], rows)
    counts = ", ".join(f"{count} {what}" for what, count in prepared.plan.counts.items() if count)
    report.text(f"{counts}; {format_bytes(prepared.nbytes)} would be written")


def _names(sources: list[str]) -> str:
    return f"{sources[0]} and {len(sources) - 1} more" if len(sources) > 1 else "".join(sources)
