"""One vocabulary for element types: the codes of the safetensors format, with every other spelling mapped onto them."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlctl.errors import UsageError
from rlctl.registry import suggest

if TYPE_CHECKING:
    import torch

# Bits per element, as the safetensors reference implementation counts them; F4 and F6 types are packed.
DTYPE_BITS = MappingProxyType({
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
})  # fmt: skip

TORCH_NAMES = MappingProxyType({
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
})  # fmt: skip

FLOAT_DTYPES = frozenset(d for d in DTYPE_BITS if d.startswith(("F", "BF")))

_ALIASES = {
    **{name: code for code, name in TORCH_NAMES.items()},
    **{code.lower(): code for code in DTYPE_BITS},
    "float": "F32", "fp32": "F32", "double": "F64", "fp64": "F64", "half": "F16", "fp16": "F16",
    "bfloat": "BF16", "long": "I64", "int": "I32", "short": "I16", "byte": "U8",
    "fp8": "F8_E4M3", "float8": "F8_E4M3", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2",
}  # fmt: skip


def parse_dtype(text: str, *, where: str | None = None) -> str:
    """Return the safetensors code for ``text``: ``bf16``, ``bfloat16``, ``torch.bfloat16`` and ``BF16`` are ``"BF16"``.

    Raises UsageError with a suggestion for an unknown name.
    """
    code = _ALIASES.get(text.strip().lower().removeprefix("torch."))
    if code is None:
        near = suggest(text, _ALIASES)
        raise UsageError(f"unknown dtype {text!r}", where=where, fix=f"did you mean {near!r}?" if near else None)
    return code


def dtype_nbytes(dtype: str, count: int) -> int:
    """Return the bytes that ``count`` elements of ``dtype`` (a safetensors code) take.

    Raises ValueError when packed elements do not fill whole bytes.
    """
    bits = DTYPE_BITS[dtype] * count
    if bits % 8:
        raise ValueError(f"{count} elements of {dtype} do not fill whole bytes")
    return bits // 8


@cache
def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype for a safetensors code. Raises UsageError for a type that torch has no plain dtype for."""
    import torch

    name = TORCH_NAMES.get(dtype)
    if name is None:
        raise UsageError(
            f"torch has no element type for {dtype}", fix="such packed tensors can be copied, not computed"
        )
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


@cache
def dtype_code(dtype: torch.dtype) -> str:
    """Return the safetensors code of a torch dtype. Raises UsageError for one that the format cannot hold."""
    return parse_dtype(str(dtype))
