"""Runs a plan on tensors in memory, one target at a time; the weight sync and the file executor share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from rlctl.errors import Finding
from rlctl.keys.boxes import Box, extent
from rlctl.keys.dtypes import torch_dtype
from rlctl.keys.layout import NEW, Ref
from rlctl.keys.plan import TIED, Copy, Move, Plan, PlanError, Same

Read = Callable[[Ref, Box], torch.Tensor]


def fill(move: Move, read: Read, out: torch.Tensor) -> torch.Tensor:
    """Write the tensor of ``move`` into ``out`` (its shape and dtype; elements that no copy fills become zero).

    Args:
        move: what to make.
        read: returns a region of a source tensor, in the region's own shape.
        out: receives the result.
    """
    if move.padding:
        out.zero_()
    for copy in move.copies:
        region = read(copy.source, copy.source_box)
        out[tuple(span.slice for span in copy.target_box)] = arranged(region, copy)
    return out


def arranged(region: torch.Tensor, copy: Copy) -> torch.Tensor:
    """Return a source region of ``copy`` with its dimensions as the target has them (a view)."""
    kept = [axis for axis in copy.axes if axis != NEW]
    rest = [axis for axis in range(region.dim()) if axis not in kept]
    return region.permute(rest + kept).reshape(extent(copy.target_box))


def make(move: Move, read: Read) -> torch.Tensor:
    """Return the tensor of ``move``; a tensor that only changes its name is returned as it was read, uncopied."""
    if len(move.copies) == 1 and not move.padding:
        (copy,) = move.copies
        region = arranged(read(copy.source, copy.source_box), copy)
        return region.to(torch_dtype(move.dtype))
    return fill(move, read, torch.empty(move.shape, dtype=torch_dtype(move.dtype)))


def convert_tensors(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[Ref, torch.Tensor]]:
    """Yield every target of ``plan`` made out of ``tensors`` (keyed by ``str(ref)``), in plan order.

    Raises PlanError when the plan has findings or when tensors that must be equal differ.
    """
    plan.check()

    def read(ref: Ref, box: Box) -> torch.Tensor:
        return tensors[str(ref)][tuple(span.slice for span in box)]

    check_same(plan, read)
    for move in plan.moves:
        yield move.target, make(move, read)


def check_same(plan: Plan, read: Read) -> None:
    """Compare, byte for byte, what the plan takes for equal. Raises PlanError that names every pair that differs."""
    findings = [
        difference(same)
        for same in plan.same
        if not torch.equal(_bytes(read(same.kept, same.box)), _bytes(read(same.extra, same.box)))
    ]
    if findings:
        raise PlanError("tensors that must be equal differ", findings)


def difference(same: Same) -> Finding:
    """Return the finding for two tensors that should be equal and are not."""
    if same.reason == TIED:
        return Finding(
            f"tied in config but tensors differ: {same.extra} is not {same.kept}",
            str(same.extra),
            "set tie_word_embeddings to false in config.json to keep both, or take one of them out",
        )
    return Finding(f"{same.reason} of {same.kept}, but its values differ", str(same.extra))


def _bytes(region: torch.Tensor) -> torch.Tensor:
    return region.detach().contiguous().reshape(-1).view(torch.uint8)


def stream_tensors(plan: Plan, source: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[Ref, torch.Tensor]]:
    """Yield targets as soon as their sources have come past, letting go of each source after its last use.

    ``source`` yields (name, tensor) in any order; a model larger than memory passes when related tensors come near
    each other, as they do in module order.
    """
    plan.check()
    waiting = {move.target: len(move.sources) for move in plan.moves}
    users: dict[Ref, list[Move]] = {}
    for move in plan.moves:
        for ref in move.sources:
            users.setdefault(ref, []).append(move)
    left = Counter({ref: len(moves) for ref, moves in users.items()})
    held: dict[Ref, torch.Tensor] = {}

    def read(ref: Ref, box: Box) -> torch.Tensor:
        return held[ref][tuple(span.slice for span in box)]

    names = {str(ref): ref for ref in users}
    for move in plan.moves:
        if not move.sources:
            yield move.target, make(move, read)
    for name, tensor in source:
        if name not in names:
            continue
        ref = names[name]
        held[ref] = tensor
        for move in users[ref]:
            waiting[move.target] -= 1
            if waiting[move.target]:
                continue
            yield move.target, make(move, read)
            for used in move.sources:
                left[used] -= 1
                if not left[used]:
                    del held[used]
