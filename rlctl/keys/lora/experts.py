"""Adapters of mixture-of-experts layers in their two forms: a pair for each expert, or one pair for the whole stack.

Stacked is what PEFT's ``target_parameters`` gives on transformers 5; single is what adapters trained on transformers 4
are, and the only form that vLLM takes for most architectures. Both ways are exact, but where gate and up have different
A's their stacked pair needs the sum of their ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rlctl.errors import Finding, UsageError
from rlctl.keys.families import Experts
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import Scaling
from rlctl.keys.lora.contents import LoraModule
from rlctl.keys.lora.fusion import Pair, alpha_for_rank, block_diagonal, stack_experts
from rlctl.keys.lora.rewrite import rewritten
from rlctl.keys.plan import PlanError

if TYPE_CHECKING:
    from torch import Tensor

Made = dict[str, Callable[[], "Tensor"]]


def unstack(adapter: Adapter, moe: Experts) -> Adapter:
    """Return the adapter with a pair for each expert, under the on-disk names of ``moe``.

    Raises UsageError for an architecture whose experts have no names of their own (gpt-oss).
    """
    stacks = [m for m in adapter.contents.modules if m.kind == "experts"]
    if not stacks:
        return adapter
    if not moe.parts:
        raise UsageError("this architecture keeps its experts stacked only", fix="export the adapter as it is")
    modules = [m for m in adapter.contents.modules if m.kind != "experts"]
    made: Made = {}
    for stacked in stacks:
        container = stacked.path.removesuffix(".mlp.experts") + f".{moe.block}.experts"
        parts = moe.parts[:2] if stacked.parameter == "gate_up_proj" else moe.parts[2:]
        for expert in range(stacked.experts):
            for half, part in enumerate(parts):
                path = f"{container}.{expert}.{part}"
                rows = stacked.outputs // len(parts)
                a, b = f"{path}.lora_A.weight", f"{path}.lora_B.weight"
                modules.append(LoraModule(path, "linear", None, a, b, stacked.scaling, stacked.inputs, rows))
                made[a] = partial(_expert_a, adapter, stacked, expert)
                made[b] = partial(_expert_b, adapter, stacked, expert, half * rows, rows)
    return rewritten(adapter, modules, made)


def stack(adapter: Adapter, moe: Experts, experts: int) -> Adapter:
    """Return the adapter with one pair for each stack of ``experts`` experts.

    Where every gate and up share their A (or only one of them is adapted) the rank stays; else it is the sum of both,
    with the alpha that keeps the scaling. Raises PlanError for missing experts, and for ranks or scalings that differ
    within a stack.
    """
    pattern = re.compile(rf"(.*)\.{moe.block}\.experts\.(\d+)\.({'|'.join(moe.parts) or '(?!)'})")
    members: dict[str, dict[tuple[int, str], LoraModule]] = {}
    modules = []
    for module in adapter.contents.modules:
        one = pattern.fullmatch(module.path)
        if one is None:
            modules.append(module)
        else:
            members.setdefault(one[1], {})[int(one[2]), one[3]] = module
    if not members:
        return adapter
    made: Made = {}
    findings: list[Finding] = []
    for layer, found in members.items():
        for parameter, parts in (("gate_up_proj", moe.parts[:2]), ("down_proj", moe.parts[2:])):
            group = _Group(adapter, parts, experts, {k: m for k, m in found.items() if k[1] in parts})
            if group.members:
                depth = 1 if parameter == "gate_up_proj" and any(p == moe.parts[2] for _, p in found) else 0
                findings += group.faults(f"{layer}.{moe.block}.experts")
                modules += group.stacked(f"{layer}.mlp.experts", parameter, depth, made) if not findings else []
    if findings:
        raise PlanError("the experts' adapters cannot be stacked", findings)
    return rewritten(adapter, modules, made)


@dataclass(frozen=True)
class _Group:
    """The adapters that go into one stacked parameter, by expert and part."""

    adapter: Adapter
    parts: tuple[str, ...]
    experts: int
    members: dict[tuple[int, str], LoraModule]

    def faults(self, where: str) -> list[Finding]:
        present = {part for _, part in self.members}
        missing = [e for e in range(self.experts) if any((e, part) not in self.members for part in present)]
        if missing:
            return [Finding(f"experts {missing[:8]} of {self.experts} have no adapter of {sorted(present)}", where)]
        if len({(m.scaling, m.inputs, m.outputs) for m in self.members.values()}) > 1:
            return [Finding("ranks, alphas or shapes differ within one stack", where)]
        return []

    def stacked(self, path: str, parameter: str, depth: int, made: Made) -> list[LoraModule]:
        """Return the layer of the stack, and enter into ``made`` how its tensors are made."""
        import torch

        shared = all(len(pairs) == 1 or torch.equal(pairs[0].a, pairs[1].a) for pairs in self._pairs())
        first = next(iter(self.members.values()))
        scaling = first.scaling
        if not shared:
            rank = scaling.r * len(self.parts)
            alpha = alpha_for_rank(scaling.alpha, scaling.r, rank, rslora=self.adapter.config.use_rslora)
            scaling = Scaling(rank, alpha, scaling.value)
        wrapped = path + ".base_layer" * depth
        a, b = f"{wrapped}.lora_A.weight", f"{wrapped}.lora_B.weight"
        outputs = first.outputs * len(self.parts)
        made[a] = partial(self._a, shared)
        made[b] = partial(self._b, shared)
        return [LoraModule(path, "experts", parameter, a, b, scaling, first.inputs, outputs, self.experts, depth=depth)]

    def _pairs(self) -> Iterator[list[Pair]]:
        """Yield for each expert its pairs in the order of ``parts``; a missing one shares A and has a B of zeros."""
        for expert in range(self.experts):
            modules = [self.members.get((expert, part)) for part in self.parts]
            loaded = [None if m is None else Pair(*self.adapter.pair(m)) for m in modules]
            some = next(pair for pair in loaded if pair is not None)
            yield [Pair(some.a, some.b.new_zeros(some.b.shape)) if p is None else p for p in loaded]

    def _a(self, shared: bool) -> Tensor:
        return self._pair(shared).a

    def _b(self, shared: bool) -> Tensor:
        return self._pair(shared).b

    def _pair(self, shared: bool) -> Pair:
        import torch

        experts = []
        for pairs in self._pairs():
            a, bs = (pairs[0].a, [pair.b for pair in pairs]) if shared else block_diagonal(pairs)
            experts.append(Pair(a, torch.cat(bs)))
        return stack_experts(experts)


def _expert_a(adapter: Adapter, stacked: LoraModule, expert: int) -> Tensor:
    return adapter.pair(stacked, expert)[0].contiguous()


def _expert_b(adapter: Adapter, stacked: LoraModule, expert: int, row: int, rows: int) -> Tensor:
    return adapter.pair(stacked, expert)[1][row : row + rows].contiguous()
