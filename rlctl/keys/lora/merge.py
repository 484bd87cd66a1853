"""Folding an adapter into its base, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rlctl.errors import CheckError
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.arithmetic import merge
from rlctl.keys.lora.merge_plan import HEAD, Change, MergePlan
from rlctl.keys.lora.names import Part, parse_key

if TYPE_CHECKING:
    from torch import Tensor


class Merger:
    """Executes a plan.

    Memory: one result at a time, and 8 MiB of scratch; with ``reuse`` all results of one dtype share one buffer of the
    largest size, and a result is valid only until the next is asked for.

    Args:
        adapter: the adapter's data.
        plan: what to change.
        reuse: hand out the same buffer again and again.
    """

    def __init__(self, adapter: Adapter, plan: MergePlan, *, reuse: bool = False) -> None:
        self._adapter = adapter
        self._plan = plan
        self._buffers: dict[str, Tensor] | None = {} if reuse else None
        self._waiting = set(plan.changes)
        self._changed = False

    def tensor(self, name: str, base: Tensor) -> Tensor:
        """Return what becomes of the base tensor of this Hugging Face name: itself when the plan does not touch it,
        else a new tensor of its dtype, float32 sums cast once. ``base`` is not changed."""
        change = self._plan.changes.get(name)
        if change is None:
            return base
        self._waiting.discard(name)
        return self._apply(change, base)

    def head(self, embedding: Tensor) -> Tensor | None:
        """Return the ``lm_head.weight`` that the plan makes out of the base's embedding, or None when it makes none."""
        return None if self._plan.new_head is None else self._apply(self._plan.new_head, embedding)

    def finish(self) -> None:
        """Raise CheckError when a planned base tensor never came, or when no tensor differs from its base."""
        if self._waiting:
            names = sorted(self._waiting)
            raise CheckError(f"{len(names)} base tensors to merge into never came, {names[0]} first")
        if not self._changed:
            raise CheckError(
                "nothing merged: every targeted tensor equals its base",
                fix="is B zero (an untrained adapter), or the delta too small for the dtype of the base?",
            )

    def _apply(self, change: Change, base: Tensor) -> Tensor:
        source = base if change.replaced_by is None else self._adapter.load(change.replaced_by).to(base.dtype)
        out = self._buffer(base)
        if change.bias is not None:
            out.copy_(source.float() + change.scale * self._adapter.load(change.bias).float())
        else:
            updates = [self._adapter.low_rank(update) for update in change.updates]
            magnitude = None if change.magnitude is None else self._adapter.load(change.magnitude)
            merge(source, updates, magnitude=magnitude, per_column=change.per_column, out=out)
        if not self._changed:
            self._changed = not out.equal(base)
        return out

    def _buffer(self, like: Tensor) -> Tensor:
        import torch

        if self._buffers is None:
            return torch.empty(like.shape, dtype=like.dtype, device=like.device)
        key = f"{like.dtype} {like.device}"
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < like.numel():
            buffer = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[: like.numel()].view(like.shape)


def merge_stream(
    base: Iterable[tuple[str, Tensor]], adapter: Adapter, plan: MergePlan, *, reuse: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the merged model, name and tensor, in the order of ``base``; only one result is held at a time.

    Args:
        base: raw name and tensor; names may be wrapped or those of a model with adapters in it (adapter tensors among
            them are passed over), the names that come out are Hugging Face's.
        adapter: the adapter.
        plan: from :func:`rlctl.keys.lora.merge_plan.plan_merge`.
        reuse: results share one buffer, each valid until the next is asked for.

    Untouched tensors come out as they went in. Raises CheckError at the end when something never came or nothing
    changed.
    """
    merger = Merger(adapter, plan, reuse=reuse)
    for raw, tensor in base:
        key = parse_key(raw)
        if key.part not in (Part.BASE, Part.ORIGINAL):
            continue
        yield key.parameter, merger.tensor(key.parameter, tensor)
        if key.parameter == plan.embedding:
            head = merger.head(tensor)
            if head is not None:
                yield HEAD, head
    merger.finish()
