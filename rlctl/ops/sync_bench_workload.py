"""The weights that a sync bench moves: which tensors, their random bits, and what an optimizer step changes in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rlctl.errors import UsageError
from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.dtypes import torch_dtype
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.presets import preset
from rlctl.sync.buckets import allocate
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.sync.weights import model_weights

_ALIGNED = 256
_PIECE = 2 << 20  # words of random bits made at once
_BITS: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def model_spec(model: str) -> ModelSpec:
    """Return the spec of a folder with a config.json, or of a preset."""
    return ModelSpec.from_folder(model) if Path(model).exists() else preset(model)


def model_tensors(model: str) -> list[TensorMeta]:
    """Return the tensors of a model as they travel: those of a folder's safetensors files, or, of a folder with a
    config.json alone and of a preset, those that the architecture has, in its own dtype.

    Raises CheckpointError when index and files disagree, UsageError when nothing of it is there.
    """
    folder = Path(model)
    if folder.exists() and not _only_configured(folder):
        with Checkpoint.open(folder) as checkpoint:
            checkpoint.check()
            return [TensorMeta(entry.name, entry.dtype, tuple(entry.shape)) for entry in checkpoint.entries.values()]
    spec = model_spec(model)
    return [TensorMeta(w.name, w.dtype, w.shape) for w in model_weights(spec, spec.dtype or "BF16")]


def _only_configured(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not any(folder.glob("*.safetensors*"))


def equal_tensors(nbytes: int, count: int) -> list[TensorMeta]:
    """Return ``count`` bfloat16 tensors of equal size, ``nbytes`` together; the last takes the rest.

    Raises UsageError when that is less than one element each.
    """
    elements = nbytes // 2
    each = elements // count
    if each < 1:
        raise UsageError(f"{nbytes} bytes are too few for {count} tensors of bfloat16", where="--size")
    sizes = [each] * (count - 1) + [elements - each * (count - 1)]
    return [TensorMeta(f"layers.{i}.weight", "BF16", (size,)) for i, size in enumerate(sizes)]


def total_bytes(tensors: Sequence[TensorMeta]) -> int:
    """Return the bytes of all tensors."""
    return sum(meta.nbytes for meta in tensors)


def make(tensors: Sequence[Any], seed: int | None) -> dict[str, torch.Tensor]:
    """Return name -> tensor in touched memory: random bits of ``seed``, or zeros for None.

    ``tensors`` are TensorMeta, or what msgpack makes of them: a member process calls this.
    """
    metas = msgspec.convert(tensors, list[TensorMeta])
    offsets, end = [], 0
    for meta in metas:
        offsets.append(end)
        end += -(-meta.nbytes // _ALIGNED) * _ALIGNED
    memory = allocate(end)
    if seed is not None:
        words = memory.numpy().view(np.uint64)
        rng = np.random.Generator(np.random.SFC64(seed))
        for start in range(0, words.size, _PIECE):
            piece = words[start : start + _PIECE]
            piece[:] = rng.integers(0, 1 << 64, piece.size, dtype=np.uint64)
    return {
        meta.name: memory[offset : offset + meta.nbytes].view(torch_dtype(meta.dtype)).view(meta.shape)
        for meta, offset in zip(metas, offsets, strict=True)
    }


def mutate(weights: dict[str, torch.Tensor], *, step: int, change: float) -> None:
    """Change the bits of weights in place, the same on every rank that held the same.

    Args:
        weights: contiguous CPU tensors.
        step: of the training: each gives other bits.
        change: share of the elements that get other bits, at random places of every tensor; 1 changes every byte.
    """
    rng = np.random.Generator(np.random.SFC64(step))
    for tensor in weights.values():
        if change >= 1:
            tensor.reshape(-1).view(torch.uint8).bitwise_xor_(1 + step % 255)
            continue
        bits = tensor.reshape(-1).view(torch.uint8).numpy().view(_BITS[tensor.element_size()])
        places = rng.integers(0, bits.size, round(bits.size * change))
        bits[places] ^= rng.integers(1, 1 << (8 * bits.itemsize), places.size, dtype=bits.dtype)
