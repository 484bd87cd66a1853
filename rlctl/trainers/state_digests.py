"""A digest of each tensor that an optimizer step changes, so that a replay can name the first that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rlctl.model.base import ModelEngine
from rlctl.model.digest import tensors_digest


def state_digests(model: ModelEngine) -> dict[str, str]:
    """Return the SHA-256 of each parameter and optimizer moment, by kind and name as in ``state()``."""
    return {name: tensors_digest([(name, tensor)]) for name, tensor in _tensors(model.state(), "")}


def _tensors(state: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors(value, f"{path}/{key}" if path else str(key))
