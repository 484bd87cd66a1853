"""One declarative table for each architecture: how its tensors are called and laid out in the other schemes.

Names and shapes in Hugging Face form follow from ``rlctl.keys.families``; these tables hold what Megatron-core makes of
them and say how far each scheme is proven.
"""

from __future__ import annotations

from rlctl.errors import UsageError
from rlctl.keys.architectures import deepseek, dense, gpt_oss, moe, vision
from rlctl.keys.architectures.rows import Architecture
from rlctl.keys.model_spec import ModelSpec

ARCHITECTURES = {
    table.family: table
    for table in (
        dense.LLAMA,
        dense.QWEN2,
        dense.QWEN3,
        moe.QWEN2_MOE,
        moe.QWEN3_MOE,
        moe.MIXTRAL,
        deepseek.DEEPSEEK_V3,
        gpt_oss.GPT_OSS,
        vision.QWEN2_5_VL,
        vision.QWEN3_VL,
    )
}


def architecture(spec: ModelSpec, scheme: str = "hf") -> Architecture:
    """Return the table of a model. Raises UsageError when ``scheme`` is not supported for its architecture."""
    table = ARCHITECTURES.get(spec.family)
    if table is None:
        known = ", ".join(ARCHITECTURES)
        raise UsageError(f"{spec.model_type} can be sized, but its names not converted yet", fix=f"known: {known}")
    if scheme not in table.status:
        held = ", ".join(sorted(table.status))
        raise UsageError(f"{spec.model_type} has no {scheme} form here", fix=f"supported for it: {held}")
    return table
