"""Weights that drift from version to version, and the digests that members must say of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from rlctl.sync.member import described
from tests.sync.wire_cases import blank, hard_tensors, random_tensor

LARGE = {"big.bf16": torch.bfloat16, "big.fp8": torch.float8_e4m3fn, "big.fp32": torch.float32, "big.int": torch.int64}
ROWS = 301
FIXED = {"expanded", "conjugate"}  # their elements are not where they seem to be
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CYCLE = 16  # after so many versions the large tensors are what they were


def drifting(seed: int, content: int = 0) -> dict[str, torch.Tensor]:
    """``hard_tensors`` and larger ones, of which few elements change from ``content - 1`` to ``content``: to random
    bits, NaN payloads and -0.0 among them, or by one unit in the last place; every third version changes a tensor
    altogether."""
    tensors = hard_tensors(seed)
    for step in range(content % CYCLE):
        g = torch.Generator().manual_seed(1000 * seed + step)
        for name, tensor in tensors.items():
            if name not in FIXED:
                _flip_some(tensor.detach(), g)
    for name, dtype in LARGE.items():
        tensors[name] = _moved(name, dtype, seed, content % CYCLE)
    tensors["big.mixed"] = random_tensor((97, 33), torch.float16, torch.Generator().manual_seed(seed + content // 3))
    return tensors


def larger_blank(seed: int, content: int = 0) -> dict[str, torch.Tensor]:
    """Targets for it; one in another memory layout."""
    targets = blank(seed)
    for name, dtype in LARGE.items():
        targets[name] = torch.zeros(ROWS, 129, dtype=dtype)
    targets["big.fp32"] = torch.zeros(129, ROWS).t()
    targets["big.mixed"] = torch.zeros(97, 33, dtype=torch.float16)
    return targets


def described_drift(seed: int, content: int) -> dict[str, Any]:
    """What a member's ``digest`` says of it."""
    return {name: described(name, tensor) for name, tensor in drifting(seed, content).items()}


def _flip_some(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Flip the last bit of a few elements, where they are: strided tensors stay so."""
    bits = tensor.view(BITS[tensor.element_size()])
    bits ^= (torch.rand(tensor.shape, generator=generator) < 0.02).to(bits.dtype)


@lru_cache(maxsize=256)
def _moved(name: str, dtype: torch.dtype, seed: int, content: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * seed + 10 * content + len(name))
    if content == 0:
        return random_tensor((ROWS, 129), dtype, g)
    tensor = _moved(name, dtype, seed, content - 1).clone()
    other = random_tensor((ROWS, 129), dtype, g)
    if dtype == torch.bfloat16 and content % 2:
        bits = tensor.view(torch.int16)
        bits += (torch.rand(bits.shape, generator=g) < 0.03).short()  # one unit in the last place
    else:
        size = tensor.element_size()
        where = (torch.rand(tensor.numel(), generator=g) < 0.02).nonzero().squeeze(1)
        flat = tensor.reshape(-1).view(torch.uint8).view(-1, size)
        flat[where] = other.reshape(-1).view(torch.uint8).view(-1, size)[where]
    return tensor
