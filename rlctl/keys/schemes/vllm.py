"""The names that vLLM's own parameters have at run time, for reading weights back out of an engine.

Sending weights to vLLM, or giving it a folder, takes Hugging Face names: its loaders fuse them. Read back, query, key
and value lie one after the other in ``qkv_proj`` (head-major, not interleaved), gate and up in ``gate_up_proj``,
experts in ``w13_weight`` and ``w2_weight``, and the embedding has rows added up to a multiple of 64.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlctl.errors import UsageError
from rlctl.keys.architectures import architecture
from rlctl.keys.boxes import Span, whole
from rlctl.keys.layout import NEW, Layout, Part, Ref, Stored, alone, columns, layout, placed, rows
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import TIED
from rlctl.keys.schemes.hf import EMBEDDING, HEAD, HF_DROPS
from rlctl.keys.shapes import Shapes

VOCAB_MULTIPLE = 64
_EXPERT = re.compile(r"^(?P<block>.+)\.experts\.\d+\.")
_ROW_CUT = frozenset({"q_proj", "q_b_proj", "kv_b_proj"})
_COLUMN_CUT = (".o_proj.weight", ".down_proj.weight")


def vllm_layout(spec: ModelSpec, shapes: Shapes, *, tp: int = 1) -> Layout:
    """Return what the ``tp`` ranks of a vLLM engine hold; with one rank the shard is empty, else ``rank_<i>``.

    A key head that there are too few of for every rank is held by several. Raises UsageError for sizes that vLLM would
    not take and for architectures without this form.
    """
    architecture(spec, "vllm-runtime")
    groups_fit = spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0
    widths = (spec.heads, spec.ffn, spec.moe_ffn, spec.shared_ffn, _padded(spec.vocab))
    if not groups_fit or any(width % tp for width in widths):
        raise UsageError(f"{tp} ranks do not divide heads, groups, widths or vocabulary of this model", where="tp")
    stored: list[Stored] = []
    for rank in range(tp):
        stored += _Rank(spec, shapes, rank, tp, f"rank_{rank}" if tp > 1 else "").stored()
    return layout("vllm-runtime", stored, HF_DROPS)


def _padded(vocab: int) -> int:
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class _Rank:
    def __init__(self, spec: ModelSpec, shapes: Shapes, rank: int, size: int, shard: str) -> None:
        self.spec, self.shapes, self.rank, self.size, self.shard = spec, shapes, rank, size, shard

    def stored(self) -> Iterator[Stored]:
        blocks: set[str] = set()
        for name, shape in self.shapes.items():
            expert = _EXPERT.match(name)
            module = name.rsplit(".", 2)[-2] if name.count(".") > 1 else ""
            if expert is not None:
                if expert["block"] not in blocks:
                    blocks.add(expert["block"])
                    yield from self._experts(expert["block"])
            elif name in (EMBEDDING, HEAD):
                yield self._vocabulary(name, name)
            elif module in self._fused:
                yield from self._fuse(name, module)
            elif name.endswith(_COLUMN_CUT):
                yield self._columns(name)
            elif module in _ROW_CUT:
                yield self._one_above_the_other(name, [name], cut=True)
            else:
                yield alone(Ref(name, self.shard), name, shape)
        if self.spec.tied:
            yield self._vocabulary(HEAD, EMBEDDING)

    @property
    def _fused(self) -> dict[str, tuple[str, ...]]:
        """Modules that are fused: the first of a group with all of it, the others with nothing."""
        fused: dict[str, tuple[str, ...]] = {"gate_proj": ("gate_proj", "up_proj"), "up_proj": ()}
        if self.spec.mla is None:
            fused |= {"q_proj": ("q_proj", "k_proj", "v_proj"), "k_proj": (), "v_proj": ()}
        elif self.spec.mla.q_rank is not None:
            fused |= {"q_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "kv_a_proj_with_mqa": ()}
        return fused

    def _fuse(self, name: str, module: str) -> Iterator[Stored]:
        group = [name.replace(f".{module}.", f".{member}.") for member in self._fused[module]]
        if module == "q_proj":
            yield self._qkv(name)
        elif module == "gate_proj":
            yield self._one_above_the_other(name.replace(".gate_proj.", ".gate_up_proj."), group, cut=True)
        elif group:
            yield self._one_above_the_other(name.replace(".q_a_proj.", ".fused_qkv_a_proj."), group, cut=False)

    def _vocabulary(self, name: str, tensor: str) -> Stored:
        vocab, hidden = self.shapes[tensor]
        count = _padded(vocab) // self.size
        first = min(self.rank * count, vocab)
        real = min((self.rank + 1) * count, vocab) - first
        part = placed(tensor, rows((vocab, hidden), first, real), (0, 0))
        alias = name != tensor
        return Stored(
            Ref(name, self.shard),
            (count, hidden),
            (part,),
            optional=alias,
            written=not alias,
            note=TIED if alias else "",
        )

    def _qkv(self, query: str) -> Stored:
        d, share = self.spec.head_dim, max(self.spec.kv_heads // self.size, 1)
        heads = self.spec.heads // self.size
        group = self.rank * share if self.spec.kv_heads >= self.size else self.rank * self.spec.kv_heads // self.size
        parts = [self._rows_at(query, self.rank * heads * d, heads * d, 0)]
        for place, letter in enumerate("kv"):
            tensor = query.replace(".q_proj.", f".{letter}_proj.")
            parts.append(self._rows_at(tensor, group * d, share * d, (heads + place * share) * d))
        shape = ((heads + 2 * share) * d, *self.shapes[query][1:])
        return Stored(Ref(query.replace(".q_proj.", ".qkv_proj."), self.shard), shape, tuple(parts))

    def _one_above_the_other(self, name: str, tensors: list[str], *, cut: bool) -> Stored:
        parts, at = [], 0
        for tensor in tensors:
            count = self.shapes[tensor][0] // (self.size if cut else 1)
            parts.append(self._rows_at(tensor, self.rank * count if cut else 0, count, at))
            at += count
        return Stored(Ref(name, self.shard), (at, *self.shapes[tensors[0]][1:]), tuple(parts))

    def _rows_at(self, tensor: str, first: int, count: int, at: int) -> Part:
        shape = self.shapes[tensor]
        return placed(tensor, rows(shape, first, count), (at, *(0,) * (len(shape) - 1)))

    def _columns(self, name: str) -> Stored:
        shape = self.shapes[name]
        count = shape[1] // self.size
        part = placed(name, columns(shape, self.rank * count, count), (0, 0))
        return Stored(Ref(name, self.shard), (shape[0], count), (part,))

    def _experts(self, block: str) -> Iterator[Stored]:
        rule = self.spec.moe
        assert rule is not None
        gate, up, down = rule.parts
        width, hidden, experts = self.spec.moe_ffn // self.size, self.spec.hidden, self.spec.experts
        w13, w2 = [], []
        for e in range(experts):
            expert = f"{block}.experts.{e}."
            for place, name in enumerate((gate, up)):
                box = rows((self.spec.moe_ffn, hidden), self.rank * width, width)
                at = (Span(e, 1), Span(place * width, width), Span(0, hidden))
                w13.append(Part(f"{expert}{name}.weight", box, at, (NEW, 0, 1)))
            box = columns((hidden, self.spec.moe_ffn), self.rank * width, width)
            w2.append(Part(f"{expert}{down}.weight", box, (Span(e, 1), *whole((hidden, width))), (NEW, 0, 1)))
        base = f"{block}.experts.routed_experts"
        yield Stored(Ref(f"{base}.w13_weight", self.shard), (experts, 2 * width, hidden), tuple(w13))
        yield Stored(Ref(f"{base}.w2_weight", self.shard), (experts, hidden, width), tuple(w2))
