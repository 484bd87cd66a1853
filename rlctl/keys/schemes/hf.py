"""The two Hugging Face forms: one tensor per expert (transformers v4, and on disk) and stacked experts (v5)."""

from __future__ import annotations

import re

from rlctl.keys.boxes import Shape, Span, whole
from rlctl.keys.layout import NEW, Drop, Layout, Part, Ref, Stored, alone, layout, rows
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import TIED
from rlctl.keys.shapes import Shapes, fused_tensor_shapes, tensor_shapes

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

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
    """Return name -> shape of the canonical tensors; ``mtp`` adds the multi-token-prediction layers of a file."""
    return tensor_shapes(spec, mtp=mtp)


def hf_layout(spec: ModelSpec, shapes: Shapes) -> Layout:
    """Return the per-expert form. A tied head may be present as an alias of the embedding; it is not written."""
    stored = [alone(Ref(name), name, shape) for name, shape in shapes.items()]
    return layout("hf", [*stored, *_tied_head(spec, shapes)], HF_DROPS)


def fused_layout(spec: ModelSpec, shapes: Shapes) -> Layout:
    """Return the form with stacked experts, ``experts.gate_up_proj`` (E, 2I, h) and ``experts.down_proj`` (E, h, I).

    The multi-token-prediction layers, which transformers does not load, keep their tensors apart.
    """
    fused = fused_tensor_shapes(spec)
    stored: list[Stored] = []
    taken: set[str] = set()
    for name, shape in fused.items():
        one = alone(Ref(name), name, shape) if name in shapes else _stacked(spec, name, shape, shapes)
        taken.update(part.tensor for part in one.parts)
        stored.append(one)
    stored += [alone(Ref(name), name, shape) for name, shape in shapes.items() if name not in taken]
    return layout("hf-fused", [*stored, *_tied_head(spec, shapes)], HF_DROPS)


def _tied_head(spec: ModelSpec, shapes: Shapes) -> list[Stored]:
    if not spec.tied:
        return []
    shape = shapes[EMBEDDING]
    parts = alone(Ref(EMBEDDING), EMBEDDING, shape).parts
    return [Stored(Ref(HEAD), shape, parts, optional=True, written=False, note=TIED)]


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
