"""What a loss is computed of: rows, or a plain dict of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlctl.errors import UsageError
from rlctl.experience.rows import Floats, Row
from rlctl.experience.segments import RequestKey

Batch = Sequence[Row] | Mapping[str, torch.Tensor]
"""Rows, or tensors of N sequences of up to L tokens, each with ``input_ids``:

- ``input_ids``: int64 (N, L).
- ``response_mask``: bool (N, L), the tokens that are trained; none may be a row's first.
- ``attention_mask``: (N, L), 1 where a token is; default: everywhere. Padding may lie on either side.
- ``advantages``: float (N,) or (N, L); without them the loss is the cross entropy of the trained tokens.
- ``old_logprobs``, ``rollout_logprobs``, ``ref_logprobs``: float (N, L), the log-prob of the token at that place.
"""

_LOGPROBS = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
_KNOWN = ("input_ids", "response_mask", "attention_mask", "advantages", *_LOGPROBS)


def rows_from(batch: Batch) -> list[Row]:
    """Return the rows of a batch. Raises UsageError when it is not one."""
    if not isinstance(batch, Mapping):
        rows = list(batch)
        if not rows:
            raise UsageError("a batch of no rows has no loss")
        return rows
    _check(batch)
    size, longest = batch["input_ids"].shape
    attention = batch.get("attention_mask", torch.ones(size, longest)).bool().cpu().numpy()
    table = {name: tensor.detach().cpu().numpy() for name, tensor in batch.items() if name != "attention_mask"}
    return [
        _row(index, {name: column[index] for name, column in table.items()}, attention[index]) for index in range(size)
    ]


def has_advantages(batch: Batch) -> bool:
    """Whether a batch says what its tokens are worth."""
    return not isinstance(batch, Mapping) or "advantages" in batch


def _row(index: int, columns: Mapping[str, npt.NDArray[Any]], real: npt.NDArray[np.bool_]) -> Row:
    ids, mask = columns["input_ids"][real], columns["response_mask"][real].astype(np.bool_)
    places = np.flatnonzero(mask)
    where = f"batch, row {index}"
    if not len(places):
        raise UsageError("no token is trained", where=where, fix="leave the row out, or set its response_mask")
    first, last = int(places[0]), int(places[-1]) + 1
    if first == 0:
        raise UsageError("the first token is trained, and nothing comes before it", where=where)

    def of_response(name: str) -> Floats | None:
        if name not in columns:
            return None
        column = np.asarray(columns[name], np.float32)
        return np.ascontiguousarray(column[real][first:last]) if column.ndim else np.full(last - first, column)

    advantages, sampled = of_response("advantages"), of_response("rollout_logprobs")
    return Row(
        key=RequestKey(index, 0),
        group=index,
        prompt_ids=ids[:first].tolist(),
        response_ids=ids[first:last].tolist(),
        reward=0.0,
        rollout_logprobs=sampled if sampled is not None else np.full(last - first, np.nan, np.float32),
        versions=np.zeros(last - first, np.int64),
        old_logprobs=of_response("old_logprobs"),
        advantages=advantages if advantages is not None else np.ones(last - first, np.float32),
        mask=mask[first:last],
        ref_logprobs=of_response("ref_logprobs"),
    )  # fmt: skip


def _check(batch: Mapping[str, torch.Tensor]) -> None:
    for name in batch:
        if name not in _KNOWN:
            raise UsageError(f"a batch has no {name!r}", fix=f"known: {', '.join(_KNOWN)}")
    missing = [name for name in ("input_ids", "response_mask") if name not in batch]
    if missing:
        raise UsageError(f"a batch needs {' and '.join(missing)}")
    shape = batch["input_ids"].shape
    if len(shape) != 2 or not shape[0]:
        raise UsageError(f"input_ids is {list(shape)}, not of sequences by tokens")
    for name, tensor in batch.items():
        if tensor.shape != shape and not (name == "advantages" and tensor.shape == shape[:1]):
            raise UsageError(f"{name} is {list(tensor.shape)}, input_ids {list(shape)}")
