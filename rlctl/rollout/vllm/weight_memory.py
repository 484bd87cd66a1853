"""Giving the memory of the weights back on the CPU, where vLLM has no sleep mode."""

from __future__ import annotations

from typing import Any

import torch

Emptied = list[tuple[torch.nn.Parameter, torch.Size]]


def release(model: Any) -> Emptied:
    """Let the parameters' memory go, once nobody else has views of it; return what ``restore`` needs. Buffers stay: no
    sync brings them."""
    emptied: Emptied = []
    for parameter in model.parameters():
        if parameter.numel():
            emptied.append((parameter, parameter.shape))
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return emptied


def restore(emptied: Emptied) -> None:
    """Allocate it again, with anything in it."""
    for parameter, shape in emptied:
        parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
