"""Whether a model can be cut into so many tensor-parallel parts. No torch here: it is asked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.errors import UsageError

# Families whose decoder layers have exactly the parts that are cut.
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


def check_tensor_parallel(description: Mapping[str, Any], size: int) -> None:
    """Raise UsageError when a model cannot be cut into ``size`` parts.

    Args:
        description: the model's config.json.
        size: of a tensor-parallel group.
    """
    if size == 1:
        return
    where = "placement.trainer_tp"
    family = description.get("model_type")
    if family not in SUPPORTED:
        raise UsageError(
            f"tensor parallelism knows the layers of {', '.join(SUPPORTED)}, not of {family}",
            where=where,
            fix="set placement.trainer_tp=1: FSDP2 alone spreads any model",
        )
    heads = int(description["num_attention_heads"])
    sizes = {
        "attention heads": heads,
        "key-value heads": int(description.get("num_key_value_heads") or heads),
        "intermediate size": int(description["intermediate_size"]),
    }
    uneven = [f"{number} {name}" for name, number in sizes.items() if number % size]
    if uneven:
        valid = [n for n in range(1, min(sizes.values()) + 1) if not any(number % n for number in sizes.values())]
        raise UsageError(
            f"trainer_tp {size} does not divide the model's {' and '.join(uneven)}",
            where=where,
            fix=f"valid for this model: {', '.join(map(str, valid))}",
        )
