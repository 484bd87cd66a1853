"""One number for a set of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the SHA-256 hex digest over (name, dtype, shape, bytes) of each tensor, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        flat = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{flat.dtype}\0{tuple(flat.shape)}\0".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
