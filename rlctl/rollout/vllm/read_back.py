"""Whole tensors, put together from what each of an engine's workers holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rlctl.errors import RlctlError
from rlctl.keys.dtypes import torch_dtype
from rlctl.rollout.vllm.handles import EngineHandle
from rlctl.sync.deadline import Deadline
from rlctl.sync.member import described
from rlctl.sync.tensor_meta import TensorMeta


def whole_digests(
    handle: EngineHandle, targets: Mapping[str, TensorMeta], names: Iterable[str], deadline: Deadline
) -> dict[str, list[Any]]:
    """Return name -> [dtype, shape, digest] of tensors that several workers hold in parts, one tensor at a time.

    Raises:
        RlctlError: there is no such tensor, the workers hold it otherwise, or not all of it.
    """
    return {name: described(name, _whole(handle, targets, name, deadline)) for name in names}


def _whole(handle: EngineHandle, targets: Mapping[str, TensorMeta], name: str, deadline: Deadline) -> torch.Tensor:
    parts = [region for worker in handle.call("rlctl_read", (name,), deadline) for region in worker]
    if name not in targets or not parts:
        raise RlctlError(f"the engine holds no tensor {name}")
    whole = torch.empty(targets[name].shape, dtype=torch_dtype(parts[0][1]))
    held = torch.zeros(targets[name].shape, dtype=torch.bool)
    for box, dtype, data in parts:
        at = tuple(slice(start, stop) for start, stop in box)
        fresh = torch.frombuffer(bytearray(data), dtype=torch_dtype(dtype)).view(whole[at].shape)
        if bool(held[at].any()) and not _same_bits(whole[at][held[at]], fresh[held[at]]):
            raise RlctlError(f"workers of the engine hold different values of {name}")
        whole[at], held[at] = fresh, True
    if not bool(held.all()):
        raise RlctlError(f"no worker of the engine holds {int((~held).sum())} of the {held.numel()} values of {name}")
    return whole


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
