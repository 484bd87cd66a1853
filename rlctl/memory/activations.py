"""What one forward and backward pass keeps in memory, by arithmetic from the architecture.

The counts are those of the tensors that autograd saves in transformers 5 on torch 2.11 to 2.13 (RMS norms in float32,
scaled dot product attention without a matrix of scores, SwiGLU): they were read off with
``torch.autograd.graph.saved_tensors_hooks``, and a test reads them off again. Compare Korthikanti et al. 2022
(arXiv:2205.05198), equation 1, for the GPT-2 block.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.keys.model_spec import ModelSpec

KEPT_LOGITS = 1 << 26
"""Elements; more logits than these are made and dropped piece by piece (``rlctl.model.forward``)."""
_LOGIT_COPIES = 4
"""Float32 copies of the logits that the backward pass through the softmax has beside the saved one."""


@dataclass(frozen=True)
class MicroBatchShape:
    """The largest micro-batch of one rank.

    Attributes:
        tokens: positions, padding counted.
        responses: response tokens among them.
        rows: sequences.
    """

    tokens: int
    responses: int
    rows: int


def micro_batch_shape(*, budget: int, prompt: int, response: int, rows: int) -> MicroBatchShape:
    """Return the largest micro-batch when all sequences have full length.

    Args:
        budget: most tokens of a pass; a longer row goes alone.
        prompt, response: longest prompt and response, in tokens.
        rows: sequences of one update on one rank.
    """
    together = max(1, min(rows, budget // (prompt + response)))
    return MicroBatchShape(together * (prompt + response), together * response, together)


@dataclass(frozen=True)
class Precision:
    """Bytes of the element types of a pass.

    Attributes:
        product: of what matrix products take.
        normalised: of a norm's normalised input, which a norm computes in float32.
        stream: of the sum that runs from layer to layer.
        recast: autocast casts the weights for a pass, and each input anew for each product that takes it.
    """

    product: int
    normalised: int
    stream: int
    recast: bool = False


FLOAT32 = Precision(4, 4, 4)
AUTOCAST = Precision(2, 4, 4, recast=True)
"""bfloat16 by autocast over float32 weights (model engine ``local``)."""
BFLOAT16 = Precision(2, 2, 2)
"""Weights gathered in bfloat16 (model engine ``fsdp2``)."""


@dataclass(frozen=True)
class Saved:
    """What the decoder layers leave for the backward pass, in bytes: ``kept`` at once, and ``recomputed``, which lies
    beside it for one layer at a time where activations are computed again."""

    kept: int
    recomputed: int = 0


def saved_bytes(
    spec: ModelSpec, shape: MicroBatchShape, precision: Precision, *, tp: int = 1, checkpointing: bool = False
) -> Saved:
    """Return the bytes that the forward pass of the decoder layers leaves for the backward pass, logits apart.

    With ``checkpointing`` each layer leaves its input alone.
    """
    layers = [_layer(spec, layer, precision, tp) for layer in range(spec.layers)]
    end = spec.hidden * (4 + precision.normalised)  # the last norm: its input in float32, its normalised input
    if checkpointing:
        inputs = spec.layers * spec.hidden * precision.stream
        return Saved(shape.tokens * (inputs + end), shape.tokens * max(layers))
    return Saved(shape.tokens * (sum(layers) + end))


def logits_bytes(spec: ModelSpec, shape: MicroBatchShape, precision: Precision) -> int:
    """Return the most bytes of logits and of the hidden states that they are made of, in the backward pass."""
    chosen = shape.responses * spec.hidden * precision.product
    kept = min(shape.responses * spec.vocab, max(KEPT_LOGITS, spec.vocab))
    return chosen + (1 + _LOGIT_COPIES) * 4 * kept


def cast_weight_bytes(matrix_elements: int, precision: Precision) -> int:
    """Return the bytes of the copies of weights that autocast makes for the products of one pass."""
    return matrix_elements * precision.product if precision.recast else 0


def _layer(spec: ModelSpec, layer: int, precision: Precision, tp: int) -> int:
    """Return the bytes that one layer saves for one token."""
    product = precision.product
    # Two norms: each saves its input in float32, its normalised input and the reciprocal root; the products after them
    # save what they take, and autocast casts it anew for each of them.
    total = 2 * spec.hidden * (4 + precision.normalised) + 2 * 4
    total += _attention(spec, precision, tp)
    if spec.is_moe_layer(layer):
        routed = spec.experts_per_token
        total += spec.hidden * product + routed * (spec.hidden + 4 * spec.moe_ffn // tp) * product
        total += spec.experts * 4 * 2  # the router's logits and their softmax
        if spec.shared_ffn:
            total += (2 if precision.recast else 1) * spec.hidden * product + 4 * spec.shared_ffn // tp * product
    else:
        total += (2 if precision.recast else 1) * spec.hidden * product + 4 * spec.ffn // tp * product
    return total


def _attention(spec: ModelSpec, precision: Precision, tp: int) -> int:
    product = precision.product
    if spec.mla is not None:
        return _latent_attention(spec, precision, tp)
    query = spec.heads * spec.head_dim // tp
    key = max(spec.kv_heads // tp, 1) * spec.head_dim
    inputs = (3 if precision.recast else 1) * spec.hidden * product
    # Query, key, value, the output of attention, and its float32 log-sum-exp for each head.
    total = inputs + (2 * query + 2 * key) * product + 4 * spec.heads // tp
    if spec.qk_norm:
        heads = spec.heads // tp + max(spec.kv_heads // tp, 1)
        total += (query + key) * (4 + product) + 4 * heads
    return total


def _latent_attention(spec: ModelSpec, precision: Precision, tp: int) -> int:
    mla = spec.mla
    assert mla is not None
    heads, product = spec.heads // tp, precision.product
    inputs = (2 if precision.recast else 1) * spec.hidden * product
    low = ((mla.q_rank or 0) + mla.kv_rank) * (4 + precision.normalised + product)
    wide = heads * (2 * spec.head_dim + 2 * mla.v_dim) * product + mla.rope_dim * product
    return inputs + low + wide + 4 * heads
