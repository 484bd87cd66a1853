"""An adapter as Megatron-Bridge keeps it, and back.

Megatron has one rank and one alpha for all layers. A written adapter is therefore brought to one: smaller ranks are
padded with zeros, and a layer of another scaling has the ratio multiplied into its B. Adapters of stacked experts have
a leading dimension: (E, r, in) and (E, out, r).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from rlctl.errors import Finding
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig, Scaling
from rlctl.keys.lora.contents import Contents, LoraModule
from rlctl.keys.lora.experts import stack
from rlctl.keys.lora.fusion import (
    Fused,
    Pair,
    fuse_gate_up,
    fuse_qkv,
    pad_rank,
    split_gate_up,
    split_qkv,
    stack_experts,
    unjoin,
    unstack_experts,
)
from rlctl.keys.lora.megatron_names import Linear, MegatronKey, format_megatron_key, linears, parse_megatron_key
from rlctl.keys.lora.rewrite import fitted
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import PlanError

if TYPE_CHECKING:
    from torch import Tensor

Style = Literal["fused", "canonical"]


@dataclass(frozen=True)
class MegatronLora:
    """An adapter laid out for Megatron.

    Args:
        style: fused or canonical.
        dim, alpha: the one rank and alpha of all layers; the scaling is ``alpha / dim``.
        target_modules: last names of the adapted linear layers.
        tensors: yields name and tensor.
    """

    style: Style
    dim: int
    alpha: float
    target_modules: tuple[str, ...]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


def to_megatron(adapter: Adapter, spec: ModelSpec, style: Style, *, blocks: bool = True) -> MegatronLora:
    """Lay an adapter out for Megatron.

    Projections that Megatron fuses share one pair in style ``fused``: at their own rank where they have one A (or are
    alone; the others then get a B of zeros), else at the sum of their ranks.

    Args:
        adapter: with experts in either form.
        spec: the base model.
        style: one pair for a fused layer, or one for each projection.
        blocks: allow the sum of ranks; else different A's are an error.

    Raises PlanError for what Megatron's LoRA has no place for: DoRA, whole tensors, embeddings, unknown layers.
    """
    if spec.moe is not None:
        adapter = stack(adapter, spec.moe, spec.experts)
    found = {m.site if m.kind == "experts" else m.path: m for m in adapter.contents.modules}
    placed = [linear for linear in linears(spec) if any(path in found for path in linear.modules)]
    _check(adapter, set(found), {path for linear in placed for path in linear.modules})
    scale = Counter(m.scaling.value for m in found.values()).most_common(1)[0][0]
    lay = partial(_laid, adapter, found, scale, style, blocks, spec)
    drafts = [lay(linear, None) for linear in placed]
    widest = max(draft.width for draft in drafts)
    unit = math.lcm(*(draft.blocks for draft in drafts))  # so that block forms keep blocks of one size
    dim = -(-widest // unit) * unit

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for linear in placed:
            laid = lay(linear, dim)
            for key, pair in laid.pairs.items():
                a, b = _shaped(pair, dim, laid.experts if linear.stacked else None)
                yield format_megatron_key(MegatronKey(linear.name, key, "in")), a
                yield format_megatron_key(MegatronKey(linear.name, key, "out")), b

    targets = dict.fromkeys(linear.name.rpartition(".")[2] for linear in placed)
    return MegatronLora(style, dim, scale * dim, tuple(targets), tensors)


def from_megatron(tensors: Mapping[str, Tensor], spec: ModelSpec, *, alpha: float, blocks: bool = False) -> Adapter:
    """Read Megatron's adapter tensors (whole, with the layer numbers of the whole model), fused or canonical.

    Args:
        tensors: name -> tensor; base tensors among them are dropped.
        spec: the base model.
        alpha: Megatron's alpha; the scaling of a layer is ``alpha / rank``.
        blocks: where a fused pair is an intact block form, each projection takes its block; else, and without this,
            each keeps the whole A.

    Raises PlanError for a layer that the model does not have, DoRA magnitudes, or one of A and B missing.
    """
    known = {linear.name: linear for linear in linears(spec)}
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    dropped, findings = [], []
    for name, tensor in tensors.items():
        key = parse_megatron_key(name)
        if key is None:
            dropped.append((name, "base weight"))
        elif key.side == "magnitude":
            findings.append(Finding("DoRA of Megatron-Bridge is not read", name))
        elif key.linear not in known or (key.key and key.key not in known[key.linear].keys):
            findings.append(Finding("the model has no such linear layer", name))
        else:
            found.setdefault((key.linear, key.key), {})[key.side] = tensor
    findings += [Finding(f"linear_{next(iter(s))} without its partner", n[0]) for n, s in found.items() if len(s) < 2]
    if not found and not findings:
        findings.append(Finding(f"0 of {len(tensors)} keys are Megatron LoRA tensors"))
    if findings:
        raise PlanError("no sound Megatron adapter", findings)
    stacks = {name for name, _ in found if known[name].stacked}
    modules: list[LoraModule] = []
    made: dict[str, Tensor] = {}
    for (name, one), sides in found.items():
        linear = known[name]
        for path, pair, experts in _modules(linear, one, sides["in"], sides["out"], spec, blocks):
            value = alpha / sides["in"].shape[-2]  # by the rank of the whole pair, also where it is taken apart
            rank = pair.rank // experts
            scaling = Scaling(rank, value * rank, value)
            inner = linear.stacked and linear.gated and name.replace("linear_fc1", "linear_fc2") in stacks
            modules.append(_module(path, pair, experts if linear.stacked else None, scaling, depth=int(inner)))
            made |= {modules[-1].a: pair.a, modules[-1].b: pair.b}
    rank = Counter(m.scaling.r for m in modules).most_common(1)[0][0]
    config = fitted(AdapterConfig(r=rank, lora_alpha=alpha, task_type="CAUSAL_LM"), modules)
    return Adapter(config, Contents(tuple(modules), {}, {}, tuple(dropped)), made.__getitem__)


def _check(adapter: Adapter, found: set[str], known: set[str]) -> None:
    findings = [Finding("Megatron has no LoRA layer for it", path) for path in sorted(found - known)]
    findings += [Finding("whole tensors do not fit a LoRA adapter of Megatron's", n) for n in adapter.contents.saved]
    for module in adapter.contents.modules:
        if module.magnitude or module.bias:
            findings.append(Finding("DoRA magnitudes and LoRA biases are not written for Megatron", module.path))
    if not found:
        findings.append(Finding("the adapter has no LoRA layers"))
    if findings:
        raise PlanError("cannot write this adapter for Megatron", findings)


@dataclass(frozen=True)
class _Laid:
    """The pairs of one linear layer by canonical key, its stacked experts, and the blocks of a fused pair (1: none)
    with the rank of the widest."""

    pairs: dict[str, Pair]
    experts: int = 1
    blocks: int = 1
    block_rank: int = 0

    @property
    def width(self) -> int:
        """The least rank that holds every pair, with blocks of one size."""
        return self.blocks * self.block_rank or max(pair.rank // self.experts for pair in self.pairs.values())


def _laid(
    adapter: Adapter, found: Mapping[str, LoraModule], scale: float, style: Style, blocks: bool, spec: ModelSpec,
    linear: Linear, dim: int | None,
) -> _Laid:  # fmt: skip
    """Return the pairs of one linear layer, all at scaling ``scale``; blocks fill ``dim`` evenly when it is given."""
    members = [found.get(path) for path in linear.modules]
    scaled = [None if m is None else _at_scale(Pair(*adapter.pair(m)), m.scaling.value / scale) for m in members]
    present = [pair for pair in scaled if pair is not None]
    if len(linear.modules) == 1:
        module = members[0]
        assert module is not None
        return _Laid({"": present[0]}, module.experts)
    if style == "canonical":
        return _Laid({key: pair for key, pair in zip(linear.keys, scaled, strict=True) if pair is not None})
    rows = (spec.heads, spec.kv_heads, spec.kv_heads) if len(scaled) == 3 else (1, 1)
    unit = next(pair.b.shape[0] // n for pair, n in zip(scaled, rows, strict=True) if pair is not None)
    first = present[0]
    whole = [
        Pair(first.a, first.b.new_zeros((unit * n, first.rank))) if pair is None else pair
        for pair, n in zip(scaled, rows, strict=True)
    ]
    fused = _fuse(whole, spec, blocks=blocks)
    if fused.blocks and dim is not None:
        fused = _fuse([pad_rank(pair, dim // len(whole)) for pair in whole], spec, blocks=blocks)
    return _Laid({"": fused.pair}, blocks=max(len(fused.blocks), 1), block_rank=max(fused.blocks, default=0))


def _fuse(pairs: Sequence[Pair], spec: ModelSpec, *, blocks: bool) -> Fused:
    if len(pairs) == 3:
        return fuse_qkv(pairs[0], pairs[1], pairs[2], spec.kv_heads, blocks=blocks)
    return fuse_gate_up(pairs[0], pairs[1], blocks=blocks)


def _at_scale(pair: Pair, ratio: float) -> Pair:
    return pair if ratio == 1.0 else replace(pair, b=(pair.b.float() * ratio).to(pair.b.dtype))


def _shaped(pair: Pair, dim: int, experts: int | None) -> tuple[Tensor, Tensor]:
    """Return A and B at rank ``dim``, with a leading dimension where experts are stacked."""
    import torch

    if experts is None:
        padded = pad_rank(pair, dim)
        return padded.a, padded.b
    apart = [pad_rank(one, dim) for one in unstack_experts(pair, experts)]
    return torch.stack([one.a for one in apart]), torch.stack([one.b for one in apart])


def _modules(
    linear: Linear, key: str, a: Tensor, b: Tensor, spec: ModelSpec, blocks: bool
) -> list[tuple[str, Pair, int]]:
    """Return (Hugging Face path, pair, stacked experts) of what one Megatron pair holds."""
    if linear.stacked:
        apart = list(zip(a, b, strict=True)) if a.dim() == 3 else [(a, b)] * spec.experts
        return [(linear.modules[0], stack_experts([Pair(*one) for one in apart]), len(apart))]
    pair = Pair(a, b)
    if key or len(linear.modules) == 1:
        return [(linear.modules[linear.keys.index(key)], pair, 1)]
    parts = _split(pair, len(linear.modules), spec, blocks)
    return [(path, part, 1) for path, part in zip(linear.modules, parts, strict=True)]


def _split(pair: Pair, count: int, spec: ModelSpec, blocks: bool) -> list[Pair]:
    """Return the pairs of the projections in a fused one: its block where asked for and intact, else the whole A."""
    whole = split_qkv(Fused(pair), spec.heads, spec.kv_heads) if count == 3 else split_gate_up(Fused(pair))
    if blocks:
        apart = unjoin(pair.a, [part.b for part in whole], (pair.rank // count,) * count)
        return apart or whole
    return whole


def _module(path: str, pair: Pair, experts: int | None, scaling: Scaling, *, depth: int) -> LoraModule:
    parameter = path.rpartition(".")[2] if experts is not None else None
    module = path.rpartition(".")[0] if parameter else path
    at = f"{path}.lora_A.weight", f"{path}.lora_B.weight"
    kind: Literal["experts", "linear"] = "experts" if parameter else "linear"
    return LoraModule(
        module, kind, parameter, *at, scaling, pair.a.shape[1], pair.b.shape[0], experts or 1, depth=depth
    )
