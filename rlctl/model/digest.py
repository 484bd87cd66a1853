"""One number for a set of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the SHA-256 hex digest over (name, dtype, shape, bytes) of each tensor, in name order."""
    return ordered_digest(sorted(tensors, key=lambda item: item[0]))


def ordered_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the digest of tensors that come in name order, each looked at once."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{flat.dtype}\0{tuple(flat.shape)}\0".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
