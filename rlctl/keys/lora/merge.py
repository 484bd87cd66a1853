"""Folding an adapter into its base, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from rlctl.errors import CheckError, UsageError
from rlctl.keys.dtypes import torch_dtype
from rlctl.keys.layout import TensorInfo
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.arithmetic import dora_factor, merge_into
from rlctl.keys.lora.merge_plan import HEAD, Change, MergePlan
from rlctl.keys.lora.names import Part, parse_key

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PIECE_ELEMENTS = 1 << 20  # 2 MiB of bf16 and 4 MiB of float32: read, summed, cast and written while in the cache


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
        self._turns = count()
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

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

    def pieces(
        self, name: str, info: TensorInfo, read: Callable[[int, Tensor], None], *, ring: int = 1
    ) -> Iterator[Tensor]:
        """Yield the merged tensor of this name in runs of whole rows, which fill it in order.

        ``ring`` runs of a few MiB share their memory in turn: each is valid until that many more were asked for.

        Args:
            name: Hugging Face name of a tensor that the plan touches.
            info: shape and dtype of the base tensor.
            read: fills a tensor with the base's elements from an index on (flat, in row-major order).
        """
        import torch

        change = self._plan.changes[name]
        shape = info.shape
        dtype = torch_dtype(info.dtype)
        if change.replaced_by is not None or change.bias is not None or change.magnitude is not None or len(shape) < 2:
            base = torch.empty(shape, dtype=dtype)
            read(0, base)
            yield self.tensor(name, base, out=base if self._dtype in (None, dtype) else None)
            return
        self._check_dtype(dtype, name)
        self._waiting.discard(name)
        rows, columns = shape[-2:]
        block = max(1, min(rows, PIECE_ELEMENTS // max(columns, 1)))
        cast = self._dtype not in (None, dtype)
        before = self._memory("base", dtype, block, columns) if cast else None
        scratch = self._memory("scratch", torch.float32, block, columns)
        for expert in range(shape[0] if len(shape) == 3 else 1):
            mine = [u for u in change.updates if u.expert in (None, expert)]
            updates = [self._adapter.low_rank(update) for update in mine]
            for start in range(0, rows, block):
                height = min(block, rows - start)
                # The turns go on from tensor to tensor: the last runs of the one before may still be in use.
                turn = next(self._turns) % ring
                result = self._memory(f"result {turn}", self._dtype or dtype, height, columns)
                base = result if before is None else before[:height]
                read((expert * rows + start) * columns, base)
                shifted = [replace(u, row=u.row - start) for u in updates]
                seek = not self._changed
                self._changed |= merge_into(result, base, shifted, seek_change=seek, scratch=scratch)
                yield result

    def _memory(self, use: str, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """Return memory that is kept for this use: fresh pages cost more than the sums."""
        import torch

        kept = self._kept.get((use, dtype))
        if kept is None or kept.numel() < rows * columns:
            kept = self._kept[use, dtype] = torch.empty(max(rows * columns, PIECE_ELEMENTS), dtype=dtype)
        return kept[: rows * columns].view(rows, columns)

    def _check_dtype(self, dtype: torch.dtype, name: str) -> None:
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise UsageError(f"cannot merge into {dtype}", where=name, fix="dequantise the base model first")

    def _apply(self, change: Change, base: Tensor, name: str, out: Tensor | None) -> Tensor:
        import torch

        self._check_dtype(base.dtype, name)
        source = base if change.replaced_by is None else self._adapter.load(change.replaced_by)
        if out is None:
            out = torch.empty(base.shape, dtype=self._dtype or base.dtype, device=base.device)
        seek = not self._changed
        if seek and change.replaced_by is not None:
            self._changed = not source.to(base.dtype).equal(base)
        if change.updates:
            updates = [self._adapter.low_rank(update) for update in change.updates]
            factor, per_column = None, change.per_column
            if change.magnitude is not None:
                factor = dora_factor(source, updates, self._adapter.load(change.magnitude), per_column=per_column)
            self._changed |= merge_into(out, source, updates, factor=factor, per_column=per_column, seek_change=seek)
            return out
        whole = source.float()
        if change.bias is not None:
            whole = whole + change.scale * self._adapter.load(change.bias).float()
        self._changed |= seek and not whole.to(base.dtype).equal(base)
        return out.copy_(whole)


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
