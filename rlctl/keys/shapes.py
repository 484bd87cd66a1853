"""Names and shapes of every tensor of a model, by arithmetic from its ModelSpec.

Two forms: on disk (what ``save_pretrained`` writes and the hubs hold: one tensor per expert) and in memory
(transformers v5: each layer's experts stacked into ``gate_up_proj`` and ``down_proj``, without ``.weight``).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from rlctl.errors import UsageError
from rlctl.keys.dtypes import dtype_nbytes
from rlctl.keys.families import Experts
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.vision import vision_shapes

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def tensor_shapes(spec: ModelSpec, *, mtp: bool = False) -> Shapes:
    """Return name -> shape of every tensor on disk, in module order.

    A tied model has no ``lm_head.weight``. The multi-token-prediction layers, which transformers neither loads nor
    saves but published checkpoints hold, are listed with ``mtp=True``.
    """
    return _shapes(spec, fused=False, mtp=mtp)


def fused_tensor_shapes(spec: ModelSpec) -> Shapes:
    """Return name -> shape of every parameter and saved buffer in memory (transformers v5), in module order."""
    return _shapes(spec, fused=True, mtp=False)


def layer_shapes(spec: ModelSpec, layer: int, *, fused: bool = False) -> Shapes:
    """Return name -> shape of one decoder layer's tensors, names relative to the layer (``mlp.up_proj.weight``)."""
    return dict(_layer(spec, layer, fused))


def parameter_count(spec: ModelSpec, *, mtp: bool = False) -> int:
    """Return the number of elements in all tensors on disk (a tied head counts once)."""
    return sum(prod(s) for s in tensor_shapes(spec, mtp=mtp).values())


def active_parameter_count(spec: ModelSpec) -> int:
    """Return the number of elements that one token passes: routed experts count ``experts_per_token`` times."""
    if not spec.experts:
        return parameter_count(spec)
    idle = spec.experts - min(spec.experts_per_token, spec.experts)
    matrices = 3 * spec.hidden * spec.moe_ffn
    biases = 2 * spec.moe_ffn + spec.hidden if spec.moe and spec.moe.bias else 0
    return parameter_count(spec) - idle * (matrices + biases) * len(spec.moe_layers)


def weight_bytes(spec: ModelSpec, dtype: str | None = None, *, mtp: bool = False) -> int:
    """Return the bytes of all tensors on disk in ``dtype`` (a safetensors code; default: the configuration's own).

    Tensors that stay float32 whatever the model's dtype (the router's correction) are counted so.
    """
    chosen = dtype or spec.dtype
    if chosen is None:
        raise UsageError("the configuration names no dtype", fix="say which one to count in")
    return sum(
        dtype_nbytes("F32" if stays_float32(name) else chosen, prod(shape))
        for name, shape in tensor_shapes(spec, mtp=mtp).items()
    )


def stays_float32(name: str) -> bool:
    """Whether a tensor is kept in float32 when the model is cast (DeepSeek-V3's score-correction buffer)."""
    return name.endswith(".e_score_correction_bias")


def _shapes(spec: ModelSpec, *, fused: bool, mtp: bool) -> Shapes:
    text, vision = name_prefixes(spec, fused=fused)
    found: Shapes = {}
    if spec.vision:
        found.update((vision + name, shape) for name, shape in vision_shapes(spec.vision))
    found[f"{text}embed_tokens.weight"] = (spec.vocab, spec.hidden)
    for layer in range(spec.layers):
        prefix = f"{text}layers.{layer}."
        found.update((prefix + name, shape) for name, shape in _layer(spec, layer, fused))
    found[f"{text}norm.weight"] = (spec.hidden,)
    if not spec.tied:
        found["lm_head.weight"] = (spec.vocab, spec.hidden)
    if mtp:
        for layer in range(spec.layers, spec.layers + spec.mtp_layers):
            prefix = f"{text}layers.{layer}."
            found.update((prefix + name, shape) for name, shape in _mtp_layer(spec, layer))
    return found


def name_prefixes(spec: ModelSpec, *, fused: bool) -> tuple[str, str]:
    """Return what stands before the names of the language model and of the vision tower (empty when it has none)."""
    if spec.vision is None:
        return "model.", ""
    if spec.vision.kind == "qwen2_5_vl" and not fused:  # files keep the names of transformers before 4.52
        return "model.", "visual."
    return "model.language_model.", "model.visual."


def _layer(spec: ModelSpec, layer: int, fused: bool) -> Iterator[tuple[str, Shape]]:
    yield "input_layernorm.weight", (spec.hidden,)
    yield from _latent_attention(spec) if spec.mla else _attention(spec)
    yield "post_attention_layernorm.weight", (spec.hidden,)
    rule = spec.moe
    if rule is None or not spec.is_moe_layer(layer):
        yield from _feed_forward("mlp", spec.hidden, spec.ffn, bias=spec.mlp_bias)
    elif fused or not rule.parts:
        yield from _router(spec, rule, "mlp")
        yield from _fused_experts(spec, rule)
        yield from _shared_expert(spec, rule, "mlp")
    else:
        yield from _router(spec, rule, rule.block)
        gate, up, down = rule.parts
        wide, narrow = (spec.moe_ffn, spec.hidden), (spec.hidden, spec.moe_ffn)
        for e in range(spec.experts):
            expert = f"{rule.block}.experts.{e}."
            yield f"{expert}{gate}.weight", wide
            yield f"{expert}{up}.weight", wide
            yield f"{expert}{down}.weight", narrow
        yield from _shared_expert(spec, rule, rule.block)


def _linear(name: str, out: int, into: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _attention(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield from _linear("self_attn.q_proj", query, spec.hidden, bias=spec.qkv_bias)
    yield from _linear("self_attn.k_proj", key, spec.hidden, bias=spec.qkv_bias)
    yield from _linear("self_attn.v_proj", key, spec.hidden, bias=spec.qkv_bias)
    yield from _linear("self_attn.o_proj", spec.hidden, query, bias=spec.o_bias)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", (spec.head_dim,)
        yield "self_attn.k_norm.weight", (spec.head_dim,)
    if spec.sinks:
        yield "self_attn.sinks", (spec.heads,)


def _latent_attention(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    mla = spec.mla
    assert mla is not None
    query = spec.heads * spec.head_dim
    if mla.q_rank is None:
        yield from _linear("self_attn.q_proj", query, spec.hidden, bias=False)
    else:
        yield from _linear("self_attn.q_a_proj", mla.q_rank, spec.hidden, bias=spec.qkv_bias)
        yield "self_attn.q_a_layernorm.weight", (mla.q_rank,)
        yield from _linear("self_attn.q_b_proj", query, mla.q_rank, bias=False)
    yield from _linear("self_attn.kv_a_proj_with_mqa", mla.kv_rank + mla.rope_dim, spec.hidden, bias=spec.qkv_bias)
    yield "self_attn.kv_a_layernorm.weight", (mla.kv_rank,)
    yield from _linear("self_attn.kv_b_proj", spec.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank, bias=False)
    yield from _linear("self_attn.o_proj", spec.hidden, spec.heads * mla.v_dim, bias=spec.o_bias)


def _feed_forward(name: str, hidden: int, width: int, *, bias: bool = False) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{name}.gate_proj", width, hidden, bias=bias)
    yield from _linear(f"{name}.up_proj", width, hidden, bias=bias)
    yield from _linear(f"{name}.down_proj", hidden, width, bias=bias)


def _router(spec: ModelSpec, rule: Experts, block: str) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{block}.{rule.router}", spec.experts, spec.hidden, bias=rule.bias)
    if rule.router_correction:
        yield f"{block}.{rule.router}.e_score_correction_bias", (spec.experts,)


def _fused_experts(spec: ModelSpec, rule: Experts) -> Iterator[tuple[str, Shape]]:
    gate_up, down = (2 * spec.moe_ffn, spec.hidden), (spec.hidden, spec.moe_ffn)
    if rule.stored == "in_out":
        gate_up, down = gate_up[::-1], down[::-1]
    yield "mlp.experts.gate_up_proj", (spec.experts, *gate_up)
    if rule.bias:
        yield "mlp.experts.gate_up_proj_bias", (spec.experts, 2 * spec.moe_ffn)
    yield "mlp.experts.down_proj", (spec.experts, *down)
    if rule.bias:
        yield "mlp.experts.down_proj_bias", (spec.experts, spec.hidden)


def _shared_expert(spec: ModelSpec, rule: Experts, block: str) -> Iterator[tuple[str, Shape]]:
    if rule.shared is None or not spec.shared_ffn:
        return
    yield from _feed_forward(f"{block}.{rule.shared}", spec.hidden, spec.shared_ffn)
    if rule.shared_gate:
        yield f"{block}.{rule.shared}_gate.weight", (1, spec.hidden)


def _mtp_layer(spec: ModelSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    # DeepSeek-V3's published layer 61 also repeats the embedding and the head.
    yield "embed_tokens.weight", (spec.vocab, spec.hidden)
    yield "enorm.weight", (spec.hidden,)
    yield "hnorm.weight", (spec.hidden,)
    yield "eh_proj.weight", (spec.hidden, 2 * spec.hidden)
    yield from _layer(spec, layer, fused=False)
    yield "shared_head.norm.weight", (spec.hidden,)
    yield "shared_head.head.weight", (spec.vocab, spec.hidden)
