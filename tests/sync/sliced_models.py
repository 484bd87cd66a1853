"""Models and layouts for deliveries in slices: what each rank holds, by rules written down apart from the plan."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rlctl.keys.dtypes import torch_dtype
from rlctl.keys.model_spec import ModelSpec
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.slicing import Layouts
from tests.sync.layout_models import Array, EngineRank
from tests.sync.wire_cases import random_tensor

Tensors = dict[str, torch.Tensor]

# Slices are multiples of the alignment of buckets, so that no byte between two of them travels.
ALIGNED: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 1024, "vocab_size": 512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def random_config(rng: random.Random) -> dict[str, Any]:
    """Heads and widths divide by 4, sizes are odd otherwise."""
    return {
        "model_type": rng.choice(["qwen2", "qwen3", "llama"]), "hidden_size": rng.choice([24, 72]),
        "num_hidden_layers": rng.choice([1, 2]), "num_attention_heads": rng.choice([4, 8]),
        "num_key_value_heads": rng.choice([1, 2, 4]), "head_dim": rng.choice([2, 6]),
        "intermediate_size": rng.choice([20, 44]), "vocab_size": rng.choice([67, 130, 256]),
        "tie_word_embeddings": rng.random() < 0.5, "torch_dtype": "bfloat16",
    }  # fmt: skip


def layouts_of(config: dict[str, Any], train: ParallelLayout, tp: int) -> Layouts:
    spec = ModelSpec.from_config(config)
    return Layouts.of_model(spec, train, ParallelLayout.vllm(tp=tp, layers=spec.layers))


def whole_model(layouts: Layouts, seed: int) -> Tensors:
    """Random bits for every weight."""
    g = torch.Generator().manual_seed(seed)
    return {w.name: random_tensor(w.shape, torch_dtype(w.dtype), g) for w in layouts.weights}


def trainer_shards(layouts: Layouts, full: Tensors, rank: int) -> Tensors:
    """What FSDP2 keeps of what tensor parallelism leaves to a rank: ``torch.chunk`` on dim 0, the last ranks with less
    or nothing."""
    train = layouts.train
    dp, t = divmod(rank, train.tp)
    found = {}
    for weight in layouts.weights:
        part = _tp_part(weight.name, full[weight.name], train.tp, t)
        chunks = part.chunk(train.shard) if part.dim() else (part,) * train.shard
        place = dp % train.shard
        found[weight.name] = chunks[place].clone() if place < len(chunks) else part[:0].clone()
    return found


def _tp_part(name: str, tensor: torch.Tensor, tp: int, t: int) -> torch.Tensor:
    module = name.split(".")[-2]
    rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    if module in rows or module in ("embed_tokens", "lm_head"):
        return tensor.chunk(tp)[t]
    if module in ("o_proj", "down_proj"):
        return tensor.chunk(tp, dim=1)[t] if tensor.dim() == 2 else tensor
    return tensor


def engine_shards(config: dict[str, Any], full: Tensors, tp: int, t: int) -> Tensors:
    """What vLLM's rank ``t`` of ``tp`` computes with (vocabularies padded to 64 rows, here with zeros)."""
    spec = ModelSpec.from_config(config)
    numbers: dict[str, Array] = {n: x.view(torch.int16).numpy().astype(np.int64) for n, x in full.items()}
    rank = EngineRank(spec, numbers, tp, t, [], cut_experts=True)
    found = {n: a for layer in range(spec.layers) for n, a in rank.layer(layer).items()}
    for name, tensor in numbers.items():
        module = name.split(".")[-2]
        if "norm" in module:
            found[name] = tensor
        elif module in ("embed_tokens", "lm_head"):
            padded = np.zeros((-(-len(tensor) // 64) * 64, tensor.shape[1]), np.int64)
            padded[: len(tensor)] = tensor
            found[name] = np.split(padded, tp)[t]
        elif module == "o_proj" and tensor.ndim == 1:
            found[name] = tensor
    return {n: torch.from_numpy(a.astype(np.int16)).view(torch.bfloat16) for n, a in found.items()}


def blank_shards(config: dict[str, Any], full: Tensors, tp: int, t: int) -> Tensors:
    """Zeros in the shapes of ``engine_shards``."""
    return {n: torch.zeros_like(x) for n, x in engine_shards(config, full, tp, t).items()}


def trainer_of(config: dict[str, Any], shard: int, tp: int, rank: int, seed: int, content: int = 0) -> Tensors:
    """A trainer rank's weights: FSDP over ``shard`` ranks. ``content``: other bits."""
    layouts = layouts_of(config, ParallelLayout.fsdp(shard), tp)
    return trainer_shards(layouts, whole_model(layouts, seed + 1000 * content), rank)


def engine_of(config: dict[str, Any], tp: int, part: int) -> Tensors:
    """A rollout rank's weights, blank."""
    layouts = layouts_of(config, ParallelLayout.fsdp(1), tp)
    return blank_shards(config, whole_model(layouts, 0), tp, part)
