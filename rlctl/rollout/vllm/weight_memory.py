"""Giving the memory of the weights back on the CPU, where vLLM has no sleep mode.

The storages stay what they are and are only emptied: every view of them, and what was found by name before, is good
again once there is memory behind it.
"""

from __future__ import annotations

from typing import Any

import torch

Sizes = list[tuple[torch.UntypedStorage, int]]


def release(model: Any) -> Sizes:
    """Let the parameters' memory go; return what ``restore`` needs. Buffers stay: no sync brings them."""
    sizes: Sizes = []
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        if storage.nbytes():
            sizes.append((storage, storage.nbytes()))
            storage.resize_(0)
    return sizes


def restore(sizes: Sizes) -> int:
    """Allocate it again, with anything in it; return the bytes."""
    for storage, nbytes in sizes:
        storage.resize_(nbytes)
    return sum(nbytes for _, nbytes in sizes)
