"""Folding an adapter into its base, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rlctl.errors import CheckError, UsageError
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.arithmetic import merge_into
from rlctl.keys.lora.merge_plan import HEAD, Change, MergePlan
from rlctl.keys.lora.names import Part, parse_key

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Merger:
    """Executes a plan.

    Args:
        adapter: the adapter's data.
        plan: what to change.
        dtype: dtype of every merged tensor; that of its base when None.
    """

    def __init__(self, adapter: Adapter, plan: MergePlan, *, dtype: torch.dtype | None = None) -> None:
        self._adapter = adapter
        self._plan = plan
        self._dtype = dtype
        self._waiting = set(plan.changes)
        self._changed = False

    def tensor(self, name: str, base: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return what becomes of the base tensor of this Hugging Face name.

        That is itself when the plan does not touch it, else float32 sums cast once, in ``out`` (of the merged dtype
        and the base's shape; ``base`` itself to overwrite it) or in a new tensor. Raises UsageError for a base of no
        ordinary floating dtype: quantised weights cannot be added to.
        """
        change = self._plan.changes.get(name)
        if change is None:
            return base
        self._waiting.discard(name)
        return self._apply(change, base, name, out)

    def head(self, embedding: Tensor) -> Tensor:
        """Return the ``lm_head.weight`` that a plan with a ``new_head`` makes out of the base's embedding."""
        assert self._plan.new_head is not None, "the plan makes no head"
        return self._apply(self._plan.new_head, embedding, HEAD, None)

    def finish(self) -> None:
        """Raise CheckError when a planned base tensor never came, or when no tensor differs from its base."""
        if self._waiting:
            names = sorted(self._waiting)
            raise CheckError(f"{len(names)} base tensors to merge into never came, {names[0]} first")
        if not self._changed:
            raise CheckError(
                "nothing merged: every targeted tensor equals its base",
                fix="is the adapter untrained (B all zero), or its delta too small for the dtype of the base?",
            )

    def _apply(self, change: Change, base: Tensor, name: str, out: Tensor | None) -> Tensor:
        import torch

        if not base.is_floating_point() or base.dtype.itemsize < 2:
            raise UsageError(f"cannot merge into {base.dtype}", where=name, fix="dequantise the base model first")
        source = base if change.replaced_by is None else self._adapter.load(change.replaced_by)
        if out is None:
            out = torch.empty(base.shape, dtype=self._dtype or base.dtype, device=base.device)
        seek = not self._changed
        if change.updates or change.magnitude is not None:
            updates = [self._adapter.low_rank(update) for update in change.updates]
            magnitude = None if change.magnitude is None else self._adapter.load(change.magnitude)
            found = merge_into(
                out, source, updates, magnitude=magnitude, per_column=change.per_column, seek_change=seek
            )
        else:
            whole = source.float()
            if change.bias is not None:
                whole = whole + change.scale * self._adapter.load(change.bias).float()
            found = seek and not whole.to(base.dtype).equal(base)
            out.copy_(whole)
        self._changed |= found or (seek and change.replaced_by is not None and not source.to(base.dtype).equal(base))
        return out


def merge_stream(
    base: Iterable[tuple[str, Tensor]], adapter: Adapter, plan: MergePlan, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the merged model, name and tensor, in the order of ``base``; only one result is held at a time.

    Args:
        base: raw name and tensor; names may be wrapped or those of a model with adapters in it (adapter tensors among
            them are passed over), the names that come out are Hugging Face's.
        adapter: the adapter.
        plan: from :func:`rlctl.keys.lora.merge_plan.plan_merge`.
        dtype: dtype of every merged tensor; that of its base when None.

    Untouched tensors come out as they went in. Raises CheckError at the end when something never came or nothing
    changed.
    """
    merger = Merger(adapter, plan, dtype=dtype)
    for raw, tensor in base:
        key = parse_key(raw)
        if key.part not in (Part.BASE, Part.ORIGINAL):
            continue
        yield key.parameter, merger.tensor(key.parameter, tensor)
        if plan.new_head is not None and key.parameter == plan.embedding:
            yield HEAD, merger.head(tensor)
    merger.finish()
