"""The two Hugging Face forms: one tensor per expert (transformers v4, and on disk) and stacked experts (v5)."""

from __future__ import annotations

import re

from rlctl.keys.boxes import Shape, Span, whole
from rlctl.keys.layout import NEW, Drop, Layout, Part, Ref, Stored, alone, layout, rows
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import TIED
from rlctl.keys.shapes import Shapes, fused_tensor_shapes, name_prefixes, tensor_shapes

EMBEDDING = "model.embed_tokens.weight"  # of models of text alone
HEAD = "lm_head.weight"

# Tail of the name in a multi-token-prediction layer -> the tensor that it repeats.
MTP_COPIES = {".embed_tokens.weight": EMBEDDING, ".shared_head.head.weight": HEAD}

# Recomputed from the configuration by every loader.
BUFFERS = Drop(
    re.compile(r"(^|\.)(rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)|rotary_pos_emb\.inv_freq)$"),
    "a buffer that is recomputed from the configuration",
)
ATTENTION_MASKS = Drop(re.compile(r"\.(attn|self_attn)\.(bias|masked_bias)$"), "a constant attention mask")
EXTRA_STATE = Drop(re.compile(r"(^|\.)_extra_state(/.*)?$"), "opaque module state (fp8 scales); never exported")
RUN_STATE = Drop(
    re.compile(r"^(app\.)?(optim\w*|lr_scheduler|scheduler|dataloader\w*|train_state|trainer|rng\w*)\."),
    "optimizer and run state",
)
HF_DROPS = (BUFFERS, ATTENTION_MASKS, EXTRA_STATE, RUN_STATE)


def canonical_shapes(spec: ModelSpec, *, mtp: bool = False) -> Shapes:
    """Return name -> shape of the canonical tensors; ``mtp`` adds the multi-token-prediction layers of a file.

    The copies of embedding and head that files keep in such a layer are no tensors of their own.
    """
    shapes = tensor_shapes(spec, mtp=mtp)
    tails = tuple(MTP_COPIES)
    return {name: shape for name, shape in shapes.items() if ".layers." not in name or not name.endswith(tails)}


def hf_layout(spec: ModelSpec, shapes: Shapes) -> Layout:
    """Return the form on disk, with experts apart. A tied head may be there as an alias; it is not written."""
    stored = [alone(Ref(name), name, shape) for name, shape in shapes.items()]
    return layout("hf", [*stored, *mtp_copies(spec, shapes), *tied_head(spec, shapes, HEAD)], HF_DROPS)


def fused_layout(spec: ModelSpec, shapes: Shapes) -> Layout:
    """Return the form of transformers' models in memory: experts stacked, ``experts.gate_up_proj`` (E, 2I, h) and
    ``experts.down_proj`` (E, h, I); the parts of vision-language models under ``model.language_model`` and
    ``model.visual``.

    The multi-token-prediction layers, which transformers does not load, keep their tensors apart.
    """
    there, here = name_prefixes(spec, fused=False), name_prefixes(spec, fused=True)
    stored: list[Stored] = []
    taken: set[str] = set()
    for name, shape in fused_tensor_shapes(spec).items():
        tensor = renamed(name, here, there)
        one = alone(Ref(name), tensor, shape) if tensor in shapes else _stacked(spec, name, shape, shapes)
        taken.update(part.tensor for part in one.parts)
        stored.append(one)
    stored += [alone(Ref(name), name, shape) for name, shape in shapes.items() if name not in taken]
    return layout("hf-fused", [*stored, *mtp_copies(spec, shapes), *tied_head(spec, shapes, HEAD)], HF_DROPS)


def mtp_copies(spec: ModelSpec, shapes: Shapes) -> list[Stored]:
    """Return the copies of embedding and head in the multi-token-prediction layers, where a file has such layers."""
    copies = []
    for layer in mtp_layers(spec, shapes):
        for tail, tensor in MTP_COPIES.items():
            part = alone(Ref(tensor), tensor, shapes[tensor]).parts
            ref = Ref(f"model.layers.{layer}{tail}")
            copies.append(Stored(ref, shapes[tensor], part, optional=True, note="a copy for the prediction layer"))
    return copies


def mtp_layers(spec: ModelSpec, shapes: Shapes) -> range:
    """Return the indices of the multi-token-prediction layers among the canonical tensors."""
    held = f"model.layers.{spec.layers}.eh_proj.weight" in shapes
    return range(spec.layers, spec.layers + (spec.mtp_layers if held else 0))


def embedding(shapes: Shapes) -> str:
    """Return the name of the embedding among the canonical names."""
    return next(name for name in shapes if name.endswith("embed_tokens.weight") and ".layers." not in name)


def tied_head(spec: ModelSpec, shapes: Shapes, name: str) -> list[Stored]:
    """Return the alias ``name`` that a tied model's files may hold."""
    if not spec.tied:
        return []
    tensor = embedding(shapes)
    parts = alone(Ref(tensor), tensor, shapes[tensor]).parts
    return [Stored(Ref(name), shapes[tensor], parts, optional=True, written=False, note=TIED)]


def renamed(name: str, old: tuple[str, str], new: tuple[str, str]) -> str:
    """Return ``name`` with the prefix of the language model or of the vision tower replaced."""
    for before, after in sorted(zip(old, new, strict=True), key=lambda pair: -len(pair[0])):
        if before and name.startswith(before):
            return after + name.removeprefix(before)
    return name


def _stacked(spec: ModelSpec, name: str, shape: Shape, shapes: Shapes) -> Stored:
    rule = spec.moe
    assert rule is not None, f"{name} is in neither form"
    prefix, _, tail = name.partition(".mlp.")
    block = f"{prefix}.{rule.block}."
    if not tail.startswith("experts."):
        return alone(Ref(name), block + tail, shape)
    gate, up, down = rule.parts
    parts: list[Part] = []
    for e in range(spec.experts):
        expert = f"{block}experts.{e}."
        if tail == "experts.down_proj":
            parts.append(_in_stack(f"{expert}{down}.weight", e, 0, shapes))
        else:
            assert tail == "experts.gate_up_proj"
            parts.append(_in_stack(f"{expert}{gate}.weight", e, 0, shapes))
            parts.append(_in_stack(f"{expert}{up}.weight", e, spec.moe_ffn, shapes))
    return Stored(Ref(name), shape, tuple(parts))


def _in_stack(tensor: str, index: int, first_row: int, shapes: Shapes) -> Part:
    shape = shapes[tensor]
    return Part(tensor, whole(shape), (Span(index, 1), *rows(shape, first_row, shape[0])), (NEW, 0, 1))
