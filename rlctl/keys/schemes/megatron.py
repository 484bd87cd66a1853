"""Megatron-core in rank folders: ``mp_rank_<tp>[_<pp>[_<ep>]]/model_optim_rng.pt``, one state dict a rank.

Layer indices count from the first layer of the rank's pipeline stage, expert indices from the first expert of its
expert-parallel rank; the vocabulary is padded to a multiple of ``vocab_multiple`` x TP rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlctl.errors import Finding, FindingsError
from rlctl.keys.architectures import architecture
from rlctl.keys.architectures.rows import Architecture, Kind, Row
from rlctl.keys.boxes import Shape
from rlctl.keys.layout import Drop, Layout, Part, Ref, Stored, alone, columns, layout, placed, rows, whole_part
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import TIED
from rlctl.keys.schemes.hf import EMBEDDING, EXTRA_STATE, HEAD, mtp_layers
from rlctl.keys.shapes import Shapes

STATE = Drop(re.compile(r"(^|\.)(inv_freq|local_tokens_per_expert|rng_state.*)$"), "training state, not a weight")
OPTIMIZER = Drop(re.compile(r"^(optimizer|opt_param_scheduler|rng_state|rerun_state)"), "optimizer and run state")
# What Megatron-core calls the layer inside a multi-token-prediction layer: today, and in other versions.
INNER = ("transformer_layer", "mtp_model_layer")
MEGATRON_DROPS = (EXTRA_STATE, STATE, OPTIMIZER)


@dataclass(frozen=True)
class Grid:
    """How a Megatron checkpoint is cut.

    Args:
        tp, pp, ep: tensor-, pipeline- and expert-parallel sizes; experts are cut by ``tp`` as well.
        flavour: ``te`` for Transformer Engine module names, ``local`` for Megatron's own modules.
        vocab_multiple: Megatron's ``make_vocab_size_divisible_by``.
        padded_vocab: rows of the padded embedding, when known from the files.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    flavour: str = "te"
    vocab_multiple: int = 128
    padded_vocab: int | None = None

    def folder(self, tp: int, pp: int, ep: int) -> str:
        """Return the folder name of one rank, as Megatron-LM's ``get_checkpoint_name`` spells it."""
        name = f"mp_rank_{tp:02d}"
        if self.pp > 1:
            name += f"_{pp:03d}"
        return f"{name}_{ep:03d}" if self.ep > 1 else name

    def ranks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (tp, pp, ep) of every rank that has a folder."""
        for pp in range(self.pp):
            for ep in range(self.ep):
                for tp in range(self.tp):
                    yield tp, pp, ep

    def vocab_rows(self, vocab: int) -> int:
        """Return the rows of the padded embedding."""
        unit = self.vocab_multiple * self.tp
        return self.padded_vocab or -(-vocab // unit) * unit


def check_grid(spec: ModelSpec, grid: Grid) -> None:
    """Raise FindingsError that lists every size which does not divide, with those that do."""
    findings = []

    def divides(option: str, size: int, what: str, count: int) -> None:
        if count and (size < 1 or count % size):
            valid = [str(n) for n in range(1, count + 1) if count % n == 0]
            findings.append(
                Finding(f"{what} {count} cannot be cut into {size}", option, f"valid: {', '.join(valid[:24])}")
            )

    divides("--pp", grid.pp, "num_hidden_layers", spec.layers)
    divides("--tp", grid.tp, "num_attention_heads" if spec.mla else "num_key_value_heads", _tp_heads(spec))
    if any(not spec.is_moe_layer(layer) for layer in range(spec.layers)):
        divides("--tp", grid.tp, "intermediate_size", spec.ffn)
    divides("--tp", grid.tp, "the experts' intermediate size", spec.moe_ffn if spec.experts else 0)
    divides("--tp", grid.tp, "the shared expert's intermediate size", spec.shared_ffn)
    if not spec.experts and grid.ep > 1:
        findings.append(Finding("a dense model has no experts to share out", "--ep"))
    divides("--ep", grid.ep, "the number of experts", spec.experts)
    if findings:
        raise FindingsError("the model does not divide so", findings)


def _tp_heads(spec: ModelSpec) -> int:
    return spec.heads if spec.mla else spec.kv_heads


def megatron_layout(spec: ModelSpec, shapes: Shapes, grid: Grid) -> Layout:
    """Return what every rank of ``grid`` stores. Names of the other flavour are read when present, never written.

    Raises FindingsError when a size does not divide, UsageError for an architecture without a Megatron form.
    """
    table = architecture(spec, "megatron")
    check_grid(spec, grid)
    stored: list[Stored] = []
    for tp, pp, ep in grid.ranks():
        stored += _Rank(spec, shapes, grid, table, tp, pp, ep).stored()
    return layout("megatron", stored, MEGATRON_DROPS)


@dataclass(frozen=True)
class _Rank:
    spec: ModelSpec
    shapes: Shapes
    grid: Grid
    table: Architecture
    tp: int
    pp: int
    ep: int

    @property
    def shard(self) -> str:
        return self.grid.folder(self.tp, self.pp, self.ep)

    def stored(self) -> Iterator[Stored]:
        count = self.spec.layers // self.grid.pp
        first = self.pp * count
        if self.pp == 0:
            yield self._vocabulary("embedding.word_embeddings.weight", EMBEDDING)
        for layer in range(first, first + count):
            yield from self._layer(layer, f"decoder.layers.{layer - first}.")
        if self.pp == self.grid.pp - 1:
            norm = "model.norm.weight"
            yield alone(Ref("decoder.final_layernorm.weight", self.shard), norm, self.shapes[norm])
            if not self.spec.tied:
                yield self._vocabulary("output_layer.weight", HEAD)
            else:
                # Only a last stage that is not the first keeps a copy of the embedding for its tied head.
                yield self._vocabulary("output_layer.weight", EMBEDDING, copy=TIED, written=self.grid.pp > 1)
            yield from self._prediction()

    def _prediction(self) -> Iterator[Stored]:
        """Yield the multi-token-prediction layers, which the last stage holds, with a copy of the embedding."""
        layers = mtp_layers(self.spec, self.shapes)
        if layers and self.grid.pp > 1:
            yield self._vocabulary("embedding.word_embeddings.weight", EMBEDDING, copy="for multi-token prediction")
        for layer in layers:
            prefix = f"mtp.layers.{layer - self.spec.layers}."
            for row in self.table.prediction:
                yield from self._row(row, prefix, f"model.layers.{layer}.")
            for inner in INNER:
                for stored in self._layer(layer, f"{prefix}{inner}."):
                    yield stored if inner == INNER[0] else replace(stored, optional=True, written=False)

    def _layer(self, layer: int, prefix: str) -> Iterator[Stored]:
        hf = f"model.layers.{layer}."
        sparse = self.spec.is_moe_layer(layer)
        for row in (*self.table.attention, *(self.table.sparse if sparse else self.table.dense)):
            yield from self._row(row, prefix, hf)
        if sparse:
            local = self.spec.experts // self.grid.ep
            for e in range(local):
                for row in self.table.expert:
                    yield from self._row(row, prefix, hf, e, self.ep * local + e)

    def _row(self, row: Row, prefix: str, hf: str, local: int = 0, expert: int = 0) -> Iterator[Stored]:
        tensors = [hf + name.replace("{e}", str(expert)) for name in row.hf]
        if tensors[0] not in self.shapes:
            return
        mine = row.forms()[self.grid.flavour][0]
        seen: dict[str, Kind] = dict(row.forms().values())
        seen[mine] = row.forms()[self.grid.flavour][1]
        for name, kind in seen.items():
            shape, parts = share(kind, tensors, self.shapes, self.spec, self.tp, self.grid.tp)
            ref = Ref(prefix + name.replace("{e}", str(local)), self.shard)
            yield Stored(ref, shape, parts, optional=name != mine, written=name == mine)

    def _vocabulary(self, name: str, tensor: str, *, copy: str = "", written: bool = True) -> Stored:
        vocab, hidden = self.shapes[tensor]
        count = self.grid.vocab_rows(vocab) // self.grid.tp
        first = min(self.tp * count, vocab)
        real = min((self.tp + 1) * count, vocab) - first
        parts = (placed(tensor, rows((vocab, hidden), first, real), (0, 0)),)
        ref = Ref(name, self.shard)
        return Stored(ref, (count, hidden), parts, optional=bool(copy), written=written, note=copy)


def share(
    kind: Kind, tensors: Sequence[str], shapes: Shapes, spec: ModelSpec, rank: int, size: int
) -> tuple[Shape, tuple[Part, ...]]:
    """Return shape and parts of what tensor-parallel rank ``rank`` of ``size`` holds of a tensor of ``kind``."""
    shape = shapes[tensors[0]]
    if kind == "whole":
        return shape, (whole_part(tensors[0], shape),)
    if kind == "rows":
        count = shape[0] // size
        return (count, *shape[1:]), (placed(tensors[0], rows(shape, rank * count, count), (0,) * len(shape)),)
    if kind == "columns":
        count = shape[1] // size
        return (shape[0], count), (placed(tensors[0], columns(shape, rank * count, count), (0, 0)),)
    if kind == "gate_up":
        count = shape[0] // size
        parts = [_rows_at(t, shapes, rank * count, count, i * count) for i, t in enumerate(tensors)]
        return (2 * count, *shape[1:]), tuple(parts)
    assert kind == "qkv"
    return _qkv(tensors, shapes, spec, rank, size)


def _qkv(
    tensors: Sequence[str], shapes: Shapes, spec: ModelSpec, rank: int, size: int
) -> tuple[Shape, tuple[Part, ...]]:
    """Interleave by group: the query heads of a group, then its key head, then its value head."""
    query, key, value = tensors
    d, per_group, groups = spec.head_dim, spec.heads // spec.kv_heads, spec.kv_heads // size
    parts = []
    for local in range(groups):
        group = rank * groups + local
        base = local * (per_group + 2) * d
        parts.append(_rows_at(query, shapes, group * per_group * d, per_group * d, base))
        parts.append(_rows_at(key, shapes, group * d, d, base + per_group * d))
        parts.append(_rows_at(value, shapes, group * d, d, base + (per_group + 1) * d))
    return (groups * (per_group + 2) * d, *shapes[query][1:]), tuple(parts)


def _rows_at(tensor: str, shapes: Shapes, first: int, count: int, at: int) -> Part:
    shape = shapes[tensor]
    return placed(tensor, rows(shape, first, count), (at, *(0,) * (len(shape) - 1)))
