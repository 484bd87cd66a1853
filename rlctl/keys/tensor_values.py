"""Tensors out of files and bytes out of tensors. The one module of file access that needs torch."""

from __future__ import annotations

import torch

from rlctl.errors import UsageError
from rlctl.keys.dtypes import dtype_code, torch_dtype
from rlctl.keys.shard_layout import TensorShape
from rlctl.keys.tensor_file import OpenFiles, TensorEntry


def read_tensor(files: OpenFiles, entry: TensorEntry, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor of ``entry``, read into ``out`` (contiguous, on the CPU) or into fresh memory.

    Raises TensorFileError naming file and tensor, UsageError when ``out`` has another dtype or shape.
    """
    dtype = torch_dtype(entry.dtype)
    tensor = torch.empty(entry.shape, dtype=dtype) if out is None else out
    if tensor.dtype != dtype or tensor.shape != entry.shape:
        raise UsageError(f"tensor {entry.name!r} is {entry.dtype} {entry.shape}, not {tensor.dtype} {tensor.shape}")
    files.read_into(entry, tensor_bytes(tensor))
    return tensor


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a writable view of its memory; nothing is copied.

    Raises UsageError for a tensor on another device or with gaps: make it contiguous on the CPU first.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(f"a contiguous CPU tensor is needed, not {tensor.device.type} with strides {tensor.stride()}")
    if tensor.numel() == 0:
        return memoryview(bytearray())
    # A "contiguous" tensor may have any stride along a dimension of size 1, which view() to bytes refuses.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def shape_of(name: str, tensor: torch.Tensor) -> TensorShape:
    """Return what ``tensor`` is when whole: a DTensor's global shape, a ZeRO-3 partitioned parameter's full shape.

    The local part of such a tensor may be empty, so its own size must not be planned with.
    """
    shape = getattr(tensor, "ds_shape", tensor.shape)  # DeepSpeed's name for the full shape
    return TensorShape(name, dtype_code(tensor.dtype), tuple(int(size) for size in shape))
