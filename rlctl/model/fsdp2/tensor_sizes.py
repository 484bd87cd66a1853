"""Whether a model can be cut into so many tensor-parallel parts. No torch here: it is asked before anything starts."""

from __future__ import annotations

from typing import Any

from rlctl.errors import UsageError

# Families whose decoder layers have exactly the parts that are cut.
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


def check_tensor_parallel(config: Any, size: int) -> None:
    """Raise UsageError when a model of this transformers config cannot be cut into ``size`` parts."""
    if size == 1:
        return
    where = "placement.trainer_tp"
    if config.model_type not in SUPPORTED:
        raise UsageError(
            f"tensor parallelism knows the layers of {', '.join(SUPPORTED)}, not of {config.model_type}",
            where=where,
            fix="set placement.trainer_tp=1: FSDP2 alone spreads any model",
        )
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "intermediate size": config.intermediate_size,
    }
    uneven = [f"{number} {name}" for name, number in sizes.items() if number % size]
    if uneven:
        smallest = min(config.num_attention_heads, config.num_key_value_heads)
        valid = [n for n in range(1, smallest + 1) if not any(number % n for number in sizes.values())]
        raise UsageError(
            f"trainer_tp {size} does not divide the model's {' and '.join(uneven)}",
            where=where,
            fix=f"valid for this model: {', '.join(map(str, valid))}",
        )
