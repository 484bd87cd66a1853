"""A base checkpoint read as if the adapter had been folded in: regions are merged as they are read.

Any conversion that reads Hugging Face tensors through :class:`StoredTensors` merges on the way with it, to Megatron's
ranks as well, and what is not adapted is still copied byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.errors import CheckError, UsageError
from rlctl.keys.boxes import Box, Span, whole
from rlctl.keys.layout import Ref
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.arithmetic import dora_factor
from rlctl.keys.lora.merge_plan import HEAD, Change, MergePlan
from rlctl.keys.stored_tensors import StoredTensors
from rlctl.keys.tensor_file import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

_MERGEABLE = ("F64", "F32", "F16", "BF16")


class MergedTensors(StoredTensors):
    """The tensors of ``base`` (Hugging Face names) with the changes of ``plan``.

    ``infos`` are the base's, with a head where the plan makes one. Regions of adapted tensors come in float32, so that
    whoever stores them casts once; all others come as they are.

    Raises UsageError when a tensor to merge into has no ordinary floating dtype.
    """

    def __init__(self, base: StoredTensors, adapter: Adapter, plan: MergePlan) -> None:
        super().__init__({}, base.infos)
        self._base = base
        self._adapter = adapter
        self._changes = {Ref(name): (change, Ref(name)) for name, change in plan.changes.items()}
        if plan.new_head is not None:
            self.infos[Ref(HEAD)] = base.infos[Ref(plan.embedding)]
            self._changes[Ref(HEAD)] = (plan.new_head, Ref(plan.embedding))
        self._factors: dict[Ref, Tensor] = {}
        self._changed = False
        for ref in self._changes:
            if self.infos[ref].dtype not in _MERGEABLE:
                fix = "dequantise the base model first"
                raise UsageError(f"cannot merge into {self.infos[ref].dtype}", where=str(ref), fix=fix)

    def entry(self, ref: Ref) -> TensorEntry | None:
        """Return where an untouched tensor lies in one stretch; None for an adapted one, which lies nowhere."""
        return None if ref in self._changes else self._base.entry(ref)

    def files(self) -> list[Path]:
        """Return every file that holds a base tensor."""
        return self._base.files()

    def read(self, ref: Ref, box: Box) -> Tensor:
        """Return a region: merged, in float32, or as it is."""
        if ref not in self._changes:
            return self._base.read(ref, box)
        change, source = self._changes[ref]
        before = self._base.read(source, box)
        after = self._merged(ref, change, source, box, before)
        if not self._changed:
            self._changed = not after.to(before.dtype).equal(before)
        return after

    def check_changed(self) -> None:
        """Raise CheckError when nothing that was read so far differs from the base."""
        if not self._changed:
            raise CheckError(
                "nothing merged: every targeted tensor equals its base",
                fix="is the adapter untrained (B all zero), or its delta too small for the dtype of the base?",
            )

    def close(self) -> None:
        """Close the files of base and adapter."""
        self._base.close()
        self._adapter.close()

    def _merged(self, ref: Ref, change: Change, source: Ref, box: Box, before: Tensor) -> Tensor:
        import torch

        slices = tuple(span.slice for span in box)
        start = before if change.replaced_by is None else self._adapter.load(change.replaced_by)[slices]
        merged = start.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if change.bias is not None:
            return merged + change.scale * self._adapter.load(change.bias)[slices].float()
        merged = self._added(change, box, merged)
        if change.magnitude is not None:
            if ref not in self._factors:
                self._factors[ref] = self._factor(change, source)
            axis = 1 if change.per_column else 0
            factor = self._factors[ref][slices[axis]]
            merged = merged * (factor if change.per_column else factor.unsqueeze(1))
        return merged

    def _added(self, change: Change, box: Box, merged: Tensor) -> Tensor:
        """Return ``merged`` with the low-rank products of the region's rows and columns added to it."""
        for update in change.updates:
            target = merged if update.expert is None else _slice_of(merged, box[0], update.expert)
            mine, theirs = _overlap(box[-2], update.row, update.shape[0])
            if target is None or mine.start == mine.stop:
                continue
            low = self._adapter.low_rank(update)
            target[mine].addmm_(low.left[theirs], low.right[:, box[-1].slice], alpha=low.scale)
        return merged

    def _factor(self, change: Change, source: Ref) -> Tensor:
        """Return DoRA's ``m / norm`` of a whole tensor."""
        assert change.magnitude is not None
        shape = self.infos[source].shape
        if change.replaced_by is None:
            weight = self._base.read(source, whole(shape))
        else:
            weight = self._adapter.load(change.replaced_by)
        updates = [self._adapter.low_rank(update) for update in change.updates]
        magnitude = self._adapter.load(change.magnitude)
        return dora_factor(weight, updates, magnitude, per_column=change.per_column)


def _overlap(span: Span, row: int, count: int) -> tuple[slice, slice]:
    """Return which positions of ``span`` lie in rows ``row : row + count``, and which of those rows they are."""
    first = max(0, -(-(row - span.start) // span.step))
    last = min(span.size, -(-(row + count - span.start) // span.step))
    last = max(first, last)
    start = span.start + first * span.step - row
    stop = start + (last - first - 1) * span.step + 1 if last > first else start
    return slice(first, last), slice(start, stop, span.step)


def _slice_of(merged: Tensor, span: Span, expert: int) -> Tensor | None:
    """Return the part of a region that belongs to one expert, or None."""
    place, rest = divmod(expert - span.start, span.step)
    return merged[place] if rest == 0 and 0 <= place < span.size else None
