"""Which rank holds which part of which weight: FSDP shards, tensor, pipeline and expert parallelism, replicas, and
any combination of them. Arithmetic only; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

from rlctl.errors import Finding, FindingsError
from rlctl.sync.boxes import Box, narrow, shift, sizes, whole
from rlctl.sync.sharding import even_parts, even_place, even_range, shard_of, split_box
from rlctl.sync.weights import Split, Weight


class Share(NamedTuple):
    """A part of a weight and all ranks that hold it."""

    box: Box
    ranks: tuple[int, ...]


class Layout(Protocol):
    """Where the weights are.

    Weights of one shape and dtype with one ``key`` have the same ``shares``, so that a plan computes them once.
    """

    @property
    def ranks(self) -> int:
        """Number of ranks."""

    def key(self, weight: Weight) -> Hashable:
        """Return what, beside its shape, decides where a weight lies."""

    def shares(self, weight: Weight) -> Sequence[Share]:
        """Return the parts of a weight and who holds them."""

    def local(self, weight: Weight, share: Box, box: Box) -> tuple[str, Box]:
        """Return under which name, and where in that tensor, a rank that holds ``share`` keeps the ``box`` in it."""


@dataclass(frozen=True)
class TableLayout:
    """A layout given as a table, such as the shards that a model's own DTensors report.

    Attributes:
        ranks: number of ranks.
        table: name -> parts and their holders. A part lies alone in a tensor of its own, named after the weight.
    """

    ranks: int
    table: Mapping[str, Sequence[Share]]

    def key(self, weight: Weight) -> Hashable:
        """See Layout."""
        return weight.name

    def shares(self, weight: Weight) -> Sequence[Share]:
        """See Layout."""
        return self.table.get(weight.name, ())

    def local(self, weight: Weight, share: Box, box: Box) -> tuple[str, Box]:
        """See Layout."""
        return weight.name, shift(box, [low for low, _ in share])


@dataclass(frozen=True)
class ParallelLayout:
    """A regular layout. Ranks count from the fastest axis: tp, then dp, then pp (Megatron-Core and FSDP2 meshes), or
    tp, pp, dp (vLLM); ``replicas`` copies of all that come last.

    Attributes:
        tp, pp, dp: sizes of tensor, pipeline and data parallelism.
        shard: FSDP: parameters are cut on dim 0 over this many neighbouring dp ranks, the last shards being smaller or
            empty when the size is not a multiple; 1 keeps whole copies; less than dp is hybrid sharding.
        ep: groups that the routed experts are spread over, out of the tp x dp ranks of a stage.
        etp: tensor parallelism inside an expert; default: tp without expert parallelism, 1 with it.
        stacked_experts: FSDP cuts the stack of a layer's experts (transformers 5 keeps them in one tensor), not each
            expert's matrices.
        replicas: independent copies of the whole engine.
        order: which axis follows tp.
        layers: decoder layers of the model; needed when pp > 1.
        stages: layers of each stage; default: as even as can be, the first ones longer.
        vocab_multiple: vocabularies are padded to a multiple of this before they are cut.
        whole_vocab: embeddings and head are not cut by tensor parallelism, as rlctl's FSDP2 x TP keeps them.
        padded: heads and widths that tp does not divide are dealt out as evenly as can be, the first parts larger, and
            ranks keep the smaller ones padded with zeros, which do not travel.
        fused: tensors are kept as vLLM keeps them (qkv_proj, gate_up_proj, w13_weight), else under their own names.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    shard: int = 1
    ep: int = 1
    etp: int | None = None
    stacked_experts: bool = False
    replicas: int = 1
    order: Literal["tp-dp-pp", "tp-pp-dp"] = "tp-dp-pp"
    layers: int = 0
    stages: tuple[int, ...] | None = None
    vocab_multiple: int = 1
    whole_vocab: bool = False
    padded: bool = False
    fused: bool = False

    @classmethod
    def fsdp(cls, shard: int, *, tp: int = 1, replicate: int = 1, whole_vocab: bool = False) -> ParallelLayout:
        """FSDP2 over ``shard`` ranks, each tp ranks wide, in ``replicate`` copies (HSDP); experts stay stacked."""
        return cls(tp=tp, dp=shard * replicate, shard=shard, stacked_experts=True, whole_vocab=whole_vocab)

    @classmethod
    def megatron(
        cls, *, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, etp: int | None = None, layers: int = 0
    ) -> ParallelLayout:
        """Megatron-Core's default order, vocabulary padded to 128 x tp."""
        return cls(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, layers=layers, vocab_multiple=128 * tp)

    @classmethod
    def vllm(
        cls, *, tp: int = 1, pp: int = 1, dp: int = 1, ep: bool = False, replicas: int = 1, layers: int = 0
    ) -> ParallelLayout:
        """vLLM engines: ``dp`` is data parallelism of the attention inside one engine; ``ep`` spreads the experts over
        its tp x dp ranks; ``replicas`` engines.
        """
        return cls(
            tp=tp, pp=pp, dp=dp, ep=tp * dp if ep else 1, replicas=replicas, layers=layers, order="tp-pp-dp",
            vocab_multiple=64, fused=True,
        )  # fmt: skip

    def __post_init__(self) -> None:
        faults = [
            Finding(f"{name} {getattr(self, name)} is less than 1")
            for name in ("tp", "pp", "dp", "shard", "ep", "replicas", "vocab_multiple")
            if getattr(self, name) < 1
        ]
        if not faults:
            faults = list(self._faults())
        if faults:
            raise FindingsError("this layout cannot be", faults)

    def _faults(self) -> Iterable[Finding]:
        if self.dp % self.shard:
            yield Finding(f"shard {self.shard} does not divide dp {self.dp}")
        if self.tp * self.dp % (self.ep * self.expert_tp):
            yield Finding(f"ep {self.ep} x etp {self.expert_tp} does not divide tp {self.tp} x dp {self.dp}")
        if self.pp > 1 and not self.layers:
            yield Finding("pp needs the number of layers")
        if self.stages is not None and (len(self.stages) != self.pp or sum(self.stages) != self.layers):
            yield Finding(f"stages {self.stages} are not {self.pp} with {self.layers} layers together")
        if self.fused and self.shard > 1:
            yield Finding("fused tensors are not sharded by FSDP")
        if self.stages is None and self.pp > max(self.layers, 1):
            yield Finding(f"pp {self.pp} is more than {self.layers} layers")

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism inside an expert."""
        return self.etp if self.etp is not None else (self.tp if self.ep == 1 else 1)

    @property
    def engine_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp * self.dp

    @property
    def ranks(self) -> int:
        """See Layout."""
        return self.engine_ranks * self.replicas

    def key(self, weight: Weight) -> Hashable:
        """See Layout."""
        if weight.expert is None:
            return weight.split, weight.stacked, self._stages_of(weight)
        group, place, size = self._expert_place(weight)
        stack = shard_of(place, size, self._expert_shard) if self.stacked_experts else 0
        return weight.split, False, self._stages_of(weight), group, stack

    def shares(self, weight: Weight) -> Sequence[Share]:
        """See Layout. Raises UsageError when the weight cannot be cut that way."""
        holders: dict[Box, list[int]] = {}
        routed = weight.expert is not None or weight.stacked
        width, groups, shard = (self.expert_tp, self.ep, self._expert_shard) if routed else (self.tp, 1, self.shard)
        copies = self.tp * self.dp // (width * groups)
        for group in range(groups) if weight.expert is None else [self._expert_place(weight)[0]]:
            base = whole(weight.shape)
            if weight.stacked:
                base = narrow(base, 0, *even_range(weight.experts, groups, group))
            split = Split() if self.whole_vocab and weight.split.kind == "vocab" else weight.split
            for t in range(width):
                box = split_box(base, split, t, width, self.vocab_multiple, weight.name, padded=self.padded)
                for copy in range(copies):
                    part = self._shard(weight, box, copy % shard, shard)
                    if part is not None:
                        flat = t + width * (group + groups * copy)
                        holders.setdefault(part, []).extend(self._ranks_at(flat, weight))
        return [Share(box, tuple(sorted(ranks))) for box, ranks in holders.items()]

    def local(self, weight: Weight, share: Box, box: Box) -> tuple[str, Box]:
        """See Layout."""
        here = shift(box, [low for low, _ in share])
        if not self.fused or weight.fused is None:
            return weight.name, here
        width = self.tp if weight.expert is None else self.expert_tp
        # Where the part starts behind the others in the fused tensor: all ranks have room for parts of one size.
        offset = sum(
            sizes(split_box(((0, size),), split, 0, width, 1, weight.name, padded=self.padded))[0]
            for split, size in weight.fused.before
        )
        (low, high), *rest = here
        here = ((low + offset, high + offset), *rest)
        if weight.expert is None:
            return weight.fused.module, here
        place = self._expert_place(weight)[1]
        return weight.fused.module, ((place, place + 1), *here)

    @property
    def _expert_shard(self) -> int:
        """Over how many copies of an expert FSDP cuts it."""
        copies = self.tp * self.dp // (self.expert_tp * self.ep)
        return max(self.shard * copies // self.dp, 1)

    def _shard(self, weight: Weight, box: Box, index: int, count: int) -> Box | None:
        """Return FSDP shard ``index`` of ``count``, or None when it is empty."""
        if count == 1 or not box:
            return box if all(low < high for low, high in box) else None
        if self.stacked_experts and weight.expert is not None:
            _, place, size = self._expert_place(weight)
            return box if shard_of(place, size, count) == index else None
        (low, high) = box[0]
        step = -(-(high - low) // count)
        start = min(low + index * step, high)
        end = min(start + step, high)
        return narrow(box, 0, start, end) if start < end else None

    def _stages_of(self, weight: Weight) -> tuple[int, ...]:
        if self.pp == 1:
            return (0,)
        last = self.pp - 1
        if weight.layer is None or weight.layer >= self.layers:
            return {"first": (0,), "both": (0, last), "last": (last,)}[weight.ends or "last"]
        ends = accumulate(self.stages or even_parts(self.layers, self.pp))
        return (next(i for i, end in enumerate(ends) if weight.layer < end),)

    def _ranks_at(self, flat: int, weight: Weight) -> Iterable[int]:
        dp, tp = divmod(flat, self.tp)
        for stage in self._stages_of(weight):
            outer = dp + self.dp * stage if self.order == "tp-dp-pp" else stage + self.pp * dp
            for replica in range(self.replicas):
                yield tp + self.tp * outer + replica * self.engine_ranks

    def _expert_place(self, weight: Weight) -> tuple[int, int, int]:
        """Return (group, place in the group, size of the group) of the expert that a weight belongs to."""
        assert weight.expert is not None
        return even_place(weight.experts, self.ep, weight.expert)
