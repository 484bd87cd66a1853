"""Where in a base model an adapter's layers act, whichever way either keeps its experts.

The base may hold its experts one by one (as on disk) or stacked (as transformers 5 does in memory), and so may the
adapter. Every combination has an exact answer: a stacked pair is one pair for each expert, and a fused gate-and-up B is
the two B's on top of each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.errors import Finding, UsageError
from rlctl.keys.families import Experts
from rlctl.keys.lora.contents import LoraModule

_STACKED = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Update:
    """One low-rank product on a base tensor.

    Args:
        module: the adapted layer.
        source: which expert's pair out of a stacked adapter, or None.
        half: 0 or 1 for the gate or up half of B's rows, None for all of them.
        expert: slice of a stacked base tensor, or None.
        row: first row of the base tensor (or slice) that it adds to.
        transposed: the base stores (in, out), or (vocab, width) for an embedding.
    """

    module: LoraModule
    source: int | None = None
    half: int | None = None
    expert: int | None = None
    row: int = 0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the block that it adds to."""
        rows = self.module.outputs // (1 if self.half is None else 2)
        return (self.module.inputs, rows) if self.transposed else (rows, self.module.inputs)


class Sites:
    """Finds the updates of one base tensor after another and keeps count of what found its place.

    Args:
        modules: the adapted layers.
        moe: how the base names and stores experts, or None for a dense model.
        transposed: linear layers of the base store (in, out) (``fan_in_fan_out``).
    """

    def __init__(self, modules: Sequence[LoraModule], moe: Experts | None, *, transposed: bool = False) -> None:
        self.faults: list[Finding] = []
        self._moe = moe
        self._transposed = transposed
        self._layers = {self._canonical(m.site if m.kind == "experts" else m.path): m for m in modules}
        self._placed: dict[str, set[tuple[int | None, int | None]]] = {m.site: set() for m in modules}
        if moe is None and any(m.kind == "experts" for m in modules):
            raise UsageError(
                "the adapter is for stacked experts, and how the base keeps its experts is not known",
                fix="give the base model's config.json",
            )

    def updates(self, name: str, shape: tuple[int, ...]) -> tuple[Update, ...]:
        """Return the updates of the base tensor of this Hugging Face name; a shape that the adapter was not trained on
        is added to ``faults``."""
        path = self._canonical(name)
        if path.endswith(".weight"):
            found, expected = self._on_layer(path.removesuffix(".weight"))
        else:
            found, expected = self._on_stack(path, shape)
        if found and expected != shape:
            what = f"is {shape}, but the adapter of {found[0].module.site} was trained on {expected}"
            self.faults.append(Finding(what, name))
        for update in found:
            self._placed[update.module.site].add((update.source, update.half))
        return tuple(found)

    def unplaced(self) -> list[str]:
        """Return every adapted layer, or stacked expert, that found no place."""
        missing = []
        for module in self._layers.values():
            placed = self._placed[module.site]
            if not placed:
                missing.append(module.site)
            elif module.kind == "experts":
                gaps = (e for e in range(module.experts) if (e, None) not in placed and not {(e, 0), (e, 1)} <= placed)
                missing += [f"{module.site} (expert {e})" for e in gaps]
        return missing

    def _canonical(self, path: str) -> str:
        """``path`` with the MoE block named as transformers 5 names it."""
        if self._moe is None or self._moe.block == "mlp":
            return path
        return path.replace(f".{self._moe.block}.", ".mlp.")

    def _on_layer(self, path: str) -> tuple[list[Update], tuple[int, ...]]:
        """Return the updates of a 2-D weight and the shape that it must have."""
        module = self._layers.get(path)
        if module is not None and module.kind != "experts":
            update = Update(module, transposed=module.kind == "embedding" or self._transposed)
            return [update], update.shape
        if self._moe is None or not self._moe.parts:
            return [], ()
        one = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", path)
        if one is None or one[3] not in self._moe.parts:
            return [], ()
        role = self._moe.parts.index(one[3])
        stacked = self._layers.get(f"{one[1]}.{_STACKED[role // 2]}")
        if stacked is None or int(one[2]) >= stacked.experts:
            return [], ()
        update = Update(stacked, source=int(one[2]), half=role if role < 2 else None)
        return [update], update.shape

    def _on_stack(self, path: str, shape: tuple[int, ...]) -> tuple[list[Update], tuple[int, ...]]:
        """Return the updates of a 3-D stack of experts and the shape that it must have."""
        container, _, parameter = path.rpartition(".")
        if self._moe is None or parameter not in _STACKED or not container.endswith(".experts") or len(shape) != 3:
            return [], ()
        stacked = self._layers.get(path)
        if stacked is not None:
            turned = self._moe.stored == "in_out"
            found = [Update(stacked, source=e, expert=e, transposed=turned) for e in range(stacked.experts)]
            return found, (stacked.experts, *found[0].shape)
        roles = self._moe.parts[:2] if parameter == "gate_up_proj" else self._moe.parts[2:]
        found = []
        expected: tuple[int, ...] = ()
        for expert in range(shape[0]):
            for half, part in enumerate(roles):
                module = self._layers.get(f"{container}.{expert}.{part}")
                if module is not None:
                    found.append(Update(module, expert=expert, row=half * module.outputs))
                    expected = (shape[0], module.outputs * len(roles), module.inputs)
        return found, expected
