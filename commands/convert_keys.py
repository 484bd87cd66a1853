"""``rlctl convert-keys``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.errors import UsageError
from rlctl.report import Report
from rlctl.units import format_bytes, format_duration, parse_bytes

EXAMPLES = {
    "rlctl convert-keys qwen2 qwen2-mg --to megatron --tp 2": "a Hugging Face folder as Megatron rank folders",
    "rlctl convert-keys qwen2-mg qwen2 --to hf --verify": "and back, each element compared",
    "rlctl convert-keys fsdp-step-100 model --to hf --base qwen2 --dry-run": "what a sharded checkpoint would become",
    "rlctl convert-keys --inspect adapter": "what is in a folder, and what would not work",
}

Target = Literal["hf", "hf-fused", "megatron", "vllm"]


def main(
    report: Report,
    source: Annotated[Path | None, typer.Argument(metavar="SRC", help="Folder or file with the model.")] = None,
    target: Annotated[Path | None, typer.Argument(metavar="DST", help="Folder to make.")] = None,
    to: Annotated[Target | None, typer.Option("--to", help="Scheme to write.")] = None,
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
    inspect: Annotated[Path | None, typer.Option("--inspect", help="Say what is at PATH, and stop.")] = None,
) -> None:
    """Convert the names and layouts of a model's weights.

    Reads Hugging Face folders with experts apart or stacked, FSDP and torch.distributed.checkpoint output, files of
    each rank's DTensors, Megatron-core checkpoints and vLLM's own parameters. Nothing is written unless every name has
    its place; see docs/convert-keys.md.
    """
    if source is None or to is None or (target is None and not dry_run):
        raise UsageError("SRC, DST and --to are needed", fix="or --inspect PATH; see rlctl convert-keys --help")
    _convert(
        report,
        source,
        target,
        to,
        scheme=from_,
        base=base,
        dtype=dtype,
        sizes=(tp or 1, pp or 1, ep or 1),
        modules=megatron_modules,
        shard=max_shard_size,
        dry_run=dry_run,
        verify=verify,
        strict=strict,
        overwrite=overwrite,
    )
