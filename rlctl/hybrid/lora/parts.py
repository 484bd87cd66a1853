"""An adapter as weights of a transfer plan: cut over tensor-parallel ranks as the layers are that it is added to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlctl.errors import UsageError
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import LoraModule, Shapes, read_contents
from rlctl.sync.boxes import Box
from rlctl.sync.plan import Plan
from rlctl.sync.weights import Split, Weight


@dataclass(frozen=True)
class Sum:
    """One product that a rank adds to its part of a weight.

    Attributes:
        shard: the rank's tensor, by the rollout layout's local names; ``box``: the part of it.
        a, b: names of the adapter's tensors, of which the rank has what it needs for that part.
        scale: how often the product counts.
        transposed: it is (B A)^T that is added: an embedding's.
    """

    shard: str
    box: Box
    a: str
    b: str
    scale: float
    transposed: bool


def adapter_modules(config: AdapterConfig, shapes: Shapes) -> tuple[LoraModule, ...]:
    """Return an adapter's layers.

    Args:
        config: of the adapter.
        shapes: of its tensors, by their names in the model.

    Raises:
        UsageError: it has layers whose change a rank cannot work out from its own part.
    """
    modules = read_contents(shapes, config).modules
    for module in modules:
        odd = "DoRA" if module.magnitude else "an adapter on stacked experts" if module.kind == "experts" else ""
        if odd:
            raise UsageError(
                f"{odd} ({module.site}) is not folded in where a layer is cut over devices that train and generate",
                where="model.lora.use_dora" if module.magnitude else "model.lora.target_modules",
                fix="set placement.layout=colocated or separate, or train a plain or rank-stabilised adapter",
            )
    return modules


def adapter_weights(modules: Sequence[LoraModule], base: Sequence[Weight]) -> list[Weight]:
    """Return A and B of every layer as weights, in float32, under their names in the model.

    Where a layer's outputs are cut, B's rows are, and every rank has A whole; where its inputs are, A's columns are,
    and every rank has B whole. So a rank's part of B times its part of A is its part of the change.

    Args:
        modules: the adapted layers.
        base: the weights of the model.
    """
    named = {weight.name: weight for weight in base}
    found = []
    for module in modules:
        layer = named[weight_of(module)]
        split, whole = layer.split, Split()
        # (outputs, inputs) as stored; an embedding is stored (vocabulary, width), and A has the vocabulary.
        outputs_cut = split.kind != "whole" and (split.dim == 0) is (module.kind != "embedding")
        b_split = replace(split, dim=0) if outputs_cut else whole
        a_split = whole if outputs_cut or split.kind == "whole" else replace(split, dim=1)
        rank = module.scaling.r
        like = {"dtype": "F32", "layer": layer.layer, "ends": layer.ends}
        found.append(Weight(module.a, (rank, module.inputs), split=a_split, **like))  # type: ignore[arg-type]
        found.append(Weight(module.b, (module.outputs, rank), split=b_split, **like))  # type: ignore[arg-type]
    return found


def weight_of(module: LoraModule) -> str:
    """Return the name of the weight that a layer's adapter is added to."""
    return f"{module.path}.weight"


def adapter_names(modules: Sequence[LoraModule]) -> list[str]:
    """Return the names of A and B of every layer."""
    return [name for module in modules for name in (module.a, module.b)]


def adapter_bytes(plan: Plan, modules: Sequence[LoraModule]) -> int:
    """Return the bytes that a switch moves between devices when the adapter alone is missing."""
    names = set(adapter_names(modules))
    return sum(t.nbytes for t in plan.transfers() if t.tensor in names and t.link != "device")


def sums(plan: Plan, modules: Sequence[LoraModule], rank: int) -> Iterator[Sum]:
    """Yield what rollout rank ``rank`` adds to its parts; a layer of which it has none is left out."""
    named = {weight.name: weight for weight in plan.weights}
    for module in modules:
        weight = named[weight_of(module)]
        box = next((share.box for share in plan.rollout.shares(weight) if rank in share.ranks), None)
        if box is not None:
            shard, here = plan.rollout.local(weight, box, box)
            yield Sum(shard, here, module.a, module.b, module.scaling.value, module.kind == "embedding")
