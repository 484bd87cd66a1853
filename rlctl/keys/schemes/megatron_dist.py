"""Megatron-core's ``torch_dist`` checkpoints: a torch.distributed.checkpoint folder of whole tensors, read only.

Tensors are global (tensor and pipeline parallelism are undone by the format), layers carry their global index or are
stacked into one tensor (L, ...) when all are alike, experts are always stacked (E, ...).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rlctl.keys.architectures import architecture
from rlctl.keys.architectures.rows import Kind, Row
from rlctl.keys.boxes import Shape, Span
from rlctl.keys.layout import NEW, Drop, Layout, Part, Ref, Stored, alone, layout, placed, rows
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import TIED
from rlctl.keys.schemes.hf import EMBEDDING, HEAD
from rlctl.keys.schemes.megatron import MEGATRON_DROPS, share
from rlctl.keys.shapes import Shapes

NESTED_OPTIMIZER = Drop(re.compile(r"^chained_\d+\.optimizer\."), "optimizer and run state")


def megatron_dist_layout(spec: ModelSpec, shapes: Shapes, *, padded_vocab: int, stacked: bool) -> Layout:
    """Return what a ``torch_dist`` folder holds.

    Args:
        spec, shapes: the model and its canonical tensors.
        padded_vocab: rows of the embedding in the folder.
        stacked: layers are stacked (``decoder.layers.mlp...``), not numbered (``decoder.layers.0.mlp...``).

    Raises UsageError for an architecture without a Megatron form.
    """
    table = architecture(spec, "megatron")
    stored: list[Stored] = [_vocabulary("embedding.word_embeddings.weight", EMBEDDING, shapes, padded_vocab)]
    if stacked:
        stored += _layers(spec, shapes, table.attention, range(spec.layers), stacked=True)
        sparse = spec.is_moe_layer(0)
        stored += _layers(spec, shapes, table.sparse if sparse else table.dense, range(spec.layers), stacked=True)
        if sparse:
            stored += _experts(spec, shapes, table.expert, range(spec.layers), stacked=True)
    else:
        for layer in range(spec.layers):
            one = range(layer, layer + 1)
            sparse = spec.is_moe_layer(layer)
            block = table.sparse if sparse else table.dense
            stored += _layers(spec, shapes, (*table.attention, *block), one, stacked=False)
            if sparse:
                stored += _experts(spec, shapes, table.expert, one, stacked=False)
    norm = "model.norm.weight"
    stored.append(alone(Ref("decoder.final_layernorm.weight"), norm, shapes[norm]))
    head = EMBEDDING if spec.tied else HEAD
    stored.append(_vocabulary("output_layer.weight", head, shapes, padded_vocab, alias=spec.tied))
    return layout("megatron-dist", stored, (*MEGATRON_DROPS, NESTED_OPTIMIZER))


def _vocabulary(name: str, tensor: str, shapes: Shapes, padded: int, *, alias: bool = False) -> Stored:
    vocab, hidden = shapes[tensor]
    part = placed(tensor, rows((vocab, hidden), 0, vocab), (0, 0))
    note = TIED if alias else ""
    return Stored(Ref(name), (max(padded, vocab), hidden), (part,), optional=alias, written=not alias, note=note)


def _layers(spec: ModelSpec, shapes: Shapes, table: Iterable[Row], layers: range, *, stacked: bool) -> Iterator[Stored]:
    for row in table:
        names = [f"model.layers.{layer}.{row.hf[0]}" for layer in layers]
        if names[0] in shapes:
            for name, kind in _forms(row).items():
                made = [share(kind, _tensors(row, layer), shapes, spec, 0, 1) for layer in layers]
                yield _joined(name, layers, made, stacked=stacked, optional=name != row.megatron)


def _experts(
    spec: ModelSpec, shapes: Shapes, table: Iterable[Row], layers: range, *, stacked: bool
) -> Iterator[Stored]:
    for row in table:
        name = row.megatron.replace("{e}", "").replace("mlp.experts.", "mlp.experts.experts.", 1)
        made = []
        for layer in layers:
            experts = [share(row.kind, _tensors(row, layer, e), shapes, spec, 0, 1) for e in range(spec.experts)]
            made.append(_stack(experts))
        yield _joined(name, layers, made, stacked=stacked, optional=False)


def _forms(row: Row) -> dict[str, Kind]:
    # Megatron's own modules give a norm before experts the name that it has before a dense block.
    forms: dict[str, Kind] = {row.megatron: row.kind}
    if row.megatron == "pre_mlp_layernorm.weight":
        forms["mlp.linear_fc1.layer_norm_weight"] = row.kind
    return forms


def _tensors(row: Row, layer: int, expert: int = 0) -> list[str]:
    return [f"model.layers.{layer}.{name.replace('{e}', str(expert))}" for name in row.hf]


def _joined(
    name: str, layers: range, made: list[tuple[Shape, tuple[Part, ...]]], *, stacked: bool, optional: bool
) -> Stored:
    shape, parts = _stack(made) if stacked else made[0]
    place = "" if stacked else f"{layers[0]}."
    return Stored(Ref(f"decoder.layers.{place}{name}"), shape, parts, optional=optional, written=not optional)


def _stack(made: list[tuple[Shape, tuple[Part, ...]]]) -> tuple[Shape, tuple[Part, ...]]:
    """Put tensors of one shape behind each other along a new first dimension."""
    parts = [
        Part(part.tensor, part.box, (Span(index, 1), *part.at), (NEW, *part.axes))
        for index, (_, inner) in enumerate(made)
        for part in inner
    ]
    return (len(made), *made[0][0]), tuple(parts)
