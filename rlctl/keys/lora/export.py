"""An adapter written on its own, for PEFT or for vLLM, and everything that forbids it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlctl.errors import Finding
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.contents import LoraModule
from rlctl.keys.lora.experts import unstack
from rlctl.keys.lora.names import AdapterKey, Part, format_key, parse_key
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.output_folder import OutputFolder
from rlctl.keys.plan import PlanError
from rlctl.keys.shard_layout import plan_groups
from rlctl.keys.shard_writer import ShardWriter

if TYPE_CHECKING:
    from torch import Tensor

AdapterTarget = Literal["peft-file", "vllm-lora"]

_SERVED_WHOLE = ("classifier", "score")
# Families whose vLLM 0.32 classes take LoRA on the embedding and the head (their ``embedding_modules``).
_EMBEDDINGS_SERVED = ("llama", "qwen3", "qwen3_moe", "mixtral")


@dataclass(frozen=True)
class ExportReport:
    """What was written: tensors, bytes, the (name, reason) of what was left out, and notes."""

    tensors: int
    nbytes: int
    dropped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def refusals(
    adapter: Adapter, target: AdapterTarget, *, spec: ModelSpec | None = None, base_is_moved: bool = False
) -> list[Finding]:
    """Return everything that forbids an adapter of its own for ``target``.

    vLLM 0.32 takes plain LoRA only; neither takes an adapter whose base was changed when training began, unless the
    changed base is what it will be used with. ``spec`` is the base model; without it, what depends on it is not judged,
    but stacked experts for vLLM are refused.
    """
    config = adapter.config
    findings = []
    moved = config.base_moved_by()
    if moved and not base_is_moved:
        fix = "convert it with PEFT's path_initial_model_for_weight_conversion, or merge it into the changed base"
        findings.append(Finding(f"{moved} changed the base weights: the adapter alone does not fit", fix=fix))
    if target == "peft-file":
        return findings
    named = {
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "bias": config.bias if config.bias != "none" else None,
    }
    odd = [f"{name}={value!r}" for name, value in named.items() if value]
    findings += [Finding(f"vLLM does not load {what}") for what in (*odd, *config.not_plain())]
    whole = [name for name in adapter.contents.saved if not _fits_vllm(name, adapter.contents.saved[name])]
    if whole:
        what = f"modules_to_save other than {' and '.join(_SERVED_WHOLE)}: {', '.join(whole)}"
        findings.append(Finding(f"vLLM does not load {what}", fix="merge the adapter into the base instead"))
    ends = [m.path for m in adapter.contents.modules if m.path.rpartition(".")[2] in ("embed_tokens", "lm_head")]
    if ends and spec is not None and spec.family not in _EMBEDDINGS_SERVED:
        fix = "merge the adapter into the base instead"
        findings.append(Finding(f"vLLM takes no LoRA on {' and '.join(ends)} of {spec.model_type}", fix=fix))
    if spec is None and any(m.kind == "experts" for m in adapter.contents.modules):
        findings.append(Finding("the adapter is for stacked experts", fix="give the base model's config.json"))
    return findings


def for_target(
    adapter: Adapter, target: AdapterTarget, *, spec: ModelSpec | None = None, base_is_moved: bool = False
) -> Adapter:
    """Return the adapter as ``target`` wants it: for vLLM with a pair for each expert where the architecture names
    them. Raises PlanError with everything of :func:`refusals`."""
    findings = refusals(adapter, target, spec=spec, base_is_moved=base_is_moved)
    if findings:
        raise PlanError(f"cannot write this adapter for {target}", findings)
    if adapter.config.base_moved_by():
        adapter = replace(adapter, config=replace(adapter.config, init_lora_weights=True))
    if target == "vllm-lora" and spec is not None and spec.moe is not None and spec.moe.parts:
        return unstack(adapter, spec.moe)
    return adapter


def entries(adapter: Adapter, target: AdapterTarget) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every part of an adapter file, one at a time."""
    for module in adapter.contents.modules:
        for part, raw in _parts(module):
            key = AdapterKey(module.path, part, depth=module.depth)
            yield format_key(key, target), adapter.load(raw).contiguous()
    for raw in adapter.contents.saved.values():
        found = parse_key(raw)
        if target == "vllm-lora" and found.depth:
            continue
        path = found.path + ".base_layer" * found.depth
        yield format_key(AdapterKey(path, Part.SAVED, leaf=found.leaf), target), adapter.load(raw).contiguous()


def export_adapter(
    adapter: Adapter,
    folder: Path | str,
    target: AdapterTarget,
    *,
    spec: ModelSpec | None = None,
    base_is_moved: bool = False,
    overwrite: bool = False,
    sources: Sequence[Path | str] = (),
    durable: bool = True,
) -> ExportReport:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` into ``folder``, whole or not at all.

    Raises PlanError when the adapter cannot stand alone at the target, UsageError for a folder that may not be written.
    """
    from rlctl.keys.tensor_values import shape_of

    ready = for_target(adapter, target, spec=spec, base_is_moved=base_is_moved)
    layout = plan_groups([[shape_of(name, tensor) for name, tensor in entries(ready, target)]], stem="adapter_model")
    with OutputFolder(
        folder, overwrite=overwrite, sources=sources, expected_bytes=layout.nbytes, durable=durable
    ) as out:
        with ShardWriter(out.path, layout) as writer:
            for name, tensor in entries(ready, target):
                writer.write(name, tensor)
        text = json.dumps(ready.config.to_dict(), indent=2, sort_keys=True)
        (out.path / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
    dropped = [*adapter.contents.dropped]
    if target == "vllm-lora":
        copies = (raw for raw in adapter.contents.saved.values() if parse_key(raw).depth)
        dropped += [(raw, "copy of a base embedding, which vLLM does not read") for raw in copies]
    notes = list(adapter.config.notes)
    if adapter.contents.stripped:
        notes.append(f"{adapter.contents.stripped} keys stripped")
    return ExportReport(len(layout.placed), layout.total_size, tuple(dropped), tuple(notes))


def _parts(module: LoraModule) -> Iterator[tuple[Part, str]]:
    embedding = module.kind == "embedding"
    yield Part.EMBEDDING_A if embedding else Part.A, module.a
    yield Part.EMBEDDING_B if embedding else Part.B, module.b
    if module.magnitude is not None:
        yield Part.MAGNITUDE, module.magnitude
    if module.bias is not None:
        yield Part.B_BIAS, module.bias


def _fits_vllm(name: str, raw: str) -> bool:
    """Whether vLLM loads a whole tensor of this name, or passes over it as a copy of a base embedding."""
    return name.split(".")[0] in _SERVED_WHOLE or parse_key(raw).depth > 0
