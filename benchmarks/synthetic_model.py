"""Checkpoints of chosen size with random bits, written tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.shapes import tensor_shapes, weight_bytes
from rlctl.keys.shard_layout import TensorShape, plan_shards
from rlctl.keys.shard_writer import ShardWriter


def config_of(gib: float, **changes: Any) -> dict[str, Any]:
    """Return a Qwen2 configuration with as many layers as come nearest to ``gib`` GiB in bf16."""
    config: dict[str, Any] = {
        "model_type": "qwen2", "hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 8192, "vocab_size": 32000, "torch_dtype": "bfloat16", **changes,
    }  # fmt: skip
    one = weight_bytes(ModelSpec.from_config(config))
    layer = weight_bytes(ModelSpec.from_config({**config, "num_hidden_layers": 2})) - one
    config["num_hidden_layers"] = max(1, 1 + round((gib * 2**30 - one) / layer))
    return config


def write_model(folder: Path, config: dict[str, Any], *, prefix: str = "", max_shard_bytes: int = 1 << 30) -> int:
    """Write the model of ``config`` into the new ``folder``, every name behind ``prefix``; return its bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(ModelSpec.from_config(config))
    layout = plan_shards(
        (TensorShape(prefix + name, "BF16", shape) for name, shape in shapes.items()), max_shard_bytes=max_shard_bytes
    )
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(folder, layout) as writer:
        for name, placed in layout.placed.items():
            # Bits of random numbers up to 0x3fff: finite bf16 values of many sizes.
            bits = torch.randint(0, 0x4000, placed.tensor.shape, dtype=torch.int16, generator=generator)
            writer.write(name, bits.view(torch.bfloat16))
    return layout.total_size
