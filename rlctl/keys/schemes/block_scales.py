"""The scales of block-quantised weights (DeepSeek-V3's fp8): ``X.weight_scale_inv`` beside ``X.weight``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlctl.errors import UsageError
from rlctl.keys.shapes import Shapes

SUFFIX = "_scale_inv"


def scale_shapes(config: Mapping[str, Any], shapes: Shapes, names: Collection[str], *, where: str) -> Shapes:
    """Return name -> shape of the scales that belong to the weights in ``shapes`` and are among ``names``.

    One float32 for each block of ``weight_block_size`` (rows, columns), the last ones smaller. Empty for a
    configuration that does not say fp8. Raises UsageError for another quantisation, whose tensors are not known.
    """
    section = config.get("quantization_config")
    if section is None:
        return {}
    method = section.get("quant_method") if isinstance(section, dict) else None
    block = section.get("weight_block_size") if isinstance(section, dict) else None
    if method != "fp8" or not _is_block(block):
        fix = "give a checkpoint in bf16, or a --map"
        raise UsageError(f"is quantised by {method!r:.40}, which is not supported", where=where, fix=fix)
    assert isinstance(block, list)
    return {
        f"{name}{SUFFIX}": (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        for name, shape in shapes.items()
        if len(shape) == 2 and f"{name}{SUFFIX}" in names
    }


def _is_block(block: object) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
