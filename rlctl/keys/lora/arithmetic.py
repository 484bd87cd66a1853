"""What an adapter adds to a weight: pure functions on tensors, computed in float32, inputs untouched.

With s the scaling, A (r, in), B (out, r):

- linear: ``W + s*B@A``; stored transposed (``fan_in_fan_out``, W (in, out)): ``W + s*(B@A)^T``
- embedding: A (r, vocab), B (hidden, r): ``W + s*(B@A)^T``
- stacked experts: A (E*r, in), B (out, E*r); row ``e*r + k`` of A and column ``k*E + e`` of B belong to expert e, as
  PEFT lays them out
- DoRA (arXiv:2402.09353): ``m / norm(V) * V`` with ``V = W + s*B@A``, the norm over each output's row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_SCRATCH_ELEMENTS = 1 << 21  # 8 MiB of float32: stays in the last-level cache between the three passes over it


@dataclass(frozen=True)
class LowRank:
    """``scale * left @ right`` to add to rows ``row : row + n`` of a weight, or of its slice ``expert``.

    Args:
        left: (n, r), float32.
        right: (r, columns), float32.
        scale: the scaling s.
        expert: index into the first dimension of a 3-D weight, None for a 2-D one.
        row: first row.
    """

    left: Tensor
    right: Tensor
    scale: float
    expert: int | None = None
    row: int = 0


def expert_pair(a: Tensor, b: Tensor, expert: int, experts: int) -> tuple[Tensor, Tensor]:
    """Return the A (r, in) and B (out, r) of one expert out of stacked A (E*r, in) and B (out, E*r)."""
    rank = a.shape[0] // experts
    return a[expert * rank : (expert + 1) * rank], b.reshape(b.shape[0], rank, experts)[:, :, expert]


def linear_delta(a: Tensor, b: Tensor, scale: float, *, transposed: bool = False) -> Tensor:
    """Return ``scale * B@A`` in float32, shape (out, in), or (in, out) when ``transposed``."""
    delta = (b.float() @ a.float()) * scale
    return delta.T if transposed else delta


def embedding_delta(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the (vocab, hidden) delta in float32 of A (r, vocab) and B (hidden, r)."""
    return linear_delta(a, b, scale, transposed=True)


def experts_delta(a: Tensor, b: Tensor, scale: float, experts: int, *, transposed: bool = False) -> Tensor:
    """Return the (E, out, in) delta in float32 of stacked A (E*r, in) and B (out, E*r).

    ``transposed`` gives (E, in, out).
    """
    import torch

    pairs = (expert_pair(a, b, e, experts) for e in range(experts))
    return torch.stack([linear_delta(a_e, b_e, scale, transposed=transposed) for a_e, b_e in pairs])


def merge(
    weight: Tensor, updates: Sequence[LowRank], *, magnitude: Tensor | None = None, per_column: bool = False
) -> Tensor:
    """Return ``weight`` with ``updates`` and, for a matrix, DoRA's ``magnitude`` folded in, in its dtype."""
    import torch

    factor = None if magnitude is None else dora_factor(weight, updates, magnitude, per_column=per_column)
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    merge_into(out, weight, updates, factor=factor, per_column=per_column)
    return out


def merge_into(
    out: Tensor,
    weight: Tensor,
    updates: Sequence[LowRank],
    *,
    factor: Tensor | None = None,
    per_column: bool = False,
    seek_change: bool = False,
    scratch: Tensor | None = None,
) -> bool:
    """Write ``weight`` with ``updates`` added (and scaled by DoRA's ``factor``) to ``out``: float32 sums, one cast.

    Works through blocks of rows that fit the cache, so that the extra memory is a few MiB.

    Args:
        out: of ``weight``'s shape, any floating dtype; may be ``weight`` itself.
        weight: (rows, columns) or (E, rows, columns), any floating dtype.
        updates: what to add; several may touch the same rows, and all are summed before the cast.
        factor: from :func:`dora_factor`, only for a matrix: one for each row, or each column with ``per_column``.
        per_column: the outputs are the columns of the stored weight (embeddings and ``fan_in_fan_out``).
        scratch: float32 memory to work in, for at least one row; fresh memory when None.
        seek_change: look for an element of ``out`` that is not ``weight``'s, up to the first block that has one.

    Returns whether such an element was found (False when not looked for).
    """
    if weight.ndim == 2:
        return _merge_matrix(out, weight, updates, factor, per_column, seek_change, scratch)
    assert factor is None, "DoRA does not apply to stacked experts"
    changed = False
    for expert in range(weight.shape[0]):
        mine = [u for u in updates if u.expert == expert]
        seek = seek_change and not changed
        changed |= _merge_matrix(out[expert], weight[expert], mine, None, False, seek, scratch)
    return changed


def dora_factor(weight: Tensor, updates: Sequence[LowRank], magnitude: Tensor, *, per_column: bool = False) -> Tensor:
    """Return DoRA's ``m / norm`` for each output of the updated ``weight`` (a matrix), float32.

    The norms are those of rows, or of columns with ``per_column``; squares are summed in float64.
    """
    import torch

    rows, columns = weight.shape
    squares = torch.zeros(columns if per_column else rows, dtype=torch.float64, device=weight.device)
    scratch = _scratch(weight)
    for start in range(0, rows, scratch.shape[0]):
        end = min(start + scratch.shape[0], rows)
        part = _summed(weight, updates, start, end, scratch).square()
        if per_column:
            squares += part.sum(dim=0, dtype=torch.float64)
        else:
            squares[start:end] = part.sum(dim=1, dtype=torch.float64)
    return (magnitude.double() / squares.sqrt()).float()


def _merge_matrix(
    out: Tensor, weight: Tensor, updates: Sequence[LowRank], factor: Tensor | None, per_column: bool, seek: bool,
    memory: Tensor | None,
) -> bool:  # fmt: skip
    rows = weight.shape[0]
    scratch = _scratch(weight, memory)
    changed = False
    for start in range(0, rows, scratch.shape[0]):
        end = min(start + scratch.shape[0], rows)
        part = _summed(weight, updates, start, end, scratch)
        if factor is not None:
            part *= factor if per_column else factor[start:end].unsqueeze(1)
        if seek and not changed:
            changed = not part.to(out.dtype).equal(weight[start:end].to(out.dtype))
        out[start:end].copy_(part)
    return changed


def _scratch(weight: Tensor, memory: Tensor | None = None) -> Tensor:
    """Return float32 memory for a block of rows of ``weight``, out of ``memory`` when it is given."""
    import torch

    rows, columns = weight.shape
    if memory is not None:
        block = max(1, min(rows, memory.numel() // max(columns, 1)))
        return memory.view(-1)[: block * columns].view(block, columns)
    block = max(1, min(rows, _SCRATCH_ELEMENTS // max(columns, 1)))
    return torch.empty((block, columns), dtype=torch.float32, device=weight.device)


def _summed(weight: Tensor, updates: Sequence[LowRank], start: int, end: int, scratch: Tensor) -> Tensor:
    """Return rows ``start : end`` of the weight plus its updates, in ``scratch``."""
    part = scratch[: end - start]
    part.copy_(weight[start:end])
    for update in updates:
        first, last = max(start, update.row), min(end, update.row + update.left.shape[0])
        if first < last:
            left = update.left[first - update.row : last - update.row]
            part[first - start : last - start].addmm_(left, update.right, alpha=update.scale)
    return part
