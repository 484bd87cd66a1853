"""What a pass is said to keep, against what autograd really saves."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from rlctl.keys.model_spec import ModelSpec
from rlctl.memory.activations import (
    AUTOCAST,
    BFLOAT16,
    FLOAT32,
    MicroBatchShape,
    Precision,
    Saved,
    cast_weight_bytes,
    logits_bytes,
    micro_batch_shape,
    saved_bytes,
)
from rlctl.model.forward import response_scores
from rlctl.model.micro_batches import MicroBatch

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def drawn(kind: str, rng: random.Random) -> dict[str, object]:
    """Return the sizes of a small model."""
    kv_heads, group, dim = rng.choice([1, 2, 4]), rng.choice([1, 2, 3]), 2 * rng.randint(4, 16)
    heads = kv_heads * group
    sizes: dict[str, object] = {
        "hidden_size": heads * dim,
        "num_hidden_layers": rng.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 8 * rng.randint(8, 40),
        "vocab_size": rng.randint(50, 400),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    return sizes if kind == "qwen2" else {**sizes, "head_dim": dim}


def saved_by_autograd(model: torch.nn.Module, shape: MicroBatchShape, *, autocast: bool) -> int:
    """Return the bytes of all tensors that a forward pass saves, parameters apart."""
    length, response = shape.tokens // shape.rows, shape.responses // shape.rows
    ids = torch.randint(0, model.config.vocab_size, (shape.rows, length))
    ends = [torch.arange(r * length + length - response - 1, r * length + length - 1) for r in range(shape.rows)]
    targets = torch.randint(0, model.config.vocab_size, (shape.responses,))
    batch = MicroBatch(list(range(shape.rows)), ids, torch.cat(ends), targets, torch.zeros_like(targets))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(),
    ):
        response_scores(model, batch, temperature=1.0, entropy=False)
    return sum(seen.values())


@pytest.mark.parametrize("precision", [FLOAT32, AUTOCAST, BFLOAT16], ids=["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_saved_bytes_are_those_of_autograd(kind: str, precision: Precision) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(3):
        sizes = drawn(kind, rng)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind](**sizes)).train()
        if precision is BFLOAT16:
            model = model.to(torch.bfloat16)
        spec = ModelSpec.from_config({**sizes, "model_type": kind})
        rows, prompt, response = rng.randint(1, 4), rng.randint(2, 30), rng.randint(2, 30)
        shape = MicroBatchShape(rows * (prompt + response), rows * response, rows)
        total = saved_by_autograd(model, shape, autocast=precision.recast)
        matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
        matrices += model.get_input_embeddings().weight.numel() if sizes["tie_word_embeddings"] else 0
        expected = saved_bytes(spec, shape, precision).kept + cast_weight_bytes(matrices, precision)
        expected += shape.responses * spec.hidden * precision.product + 4 * shape.responses * spec.vocab
        # What is left out: ids, positions, targets, the rotary table and one float for each row of a norm.
        small = 8 * (shape.tokens + 4 * shape.responses) + 8 * (prompt + response) * spec.head_dim + 4 * shape.tokens
        assert 0 <= total - expected <= small, (total, expected, small, sizes)


def test_checkpointing_keeps_one_input_for_each_layer_and_one_layer() -> None:
    spec = ModelSpec.from_config(
        {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100}
    )  # fmt: skip
    shape = MicroBatchShape(10, 6, 2)
    layer = 4 * (6 * 64 + 2 * 64 + 2 * 32 + 4 * 128) + 4 * (2 + 4)
    assert saved_bytes(spec, shape, FLOAT32) == Saved(10 * (5 * layer + 2 * 64 * 4))
    assert saved_bytes(spec, shape, FLOAT32, checkpointing=True) == Saved(10 * (5 * 64 * 4 + 2 * 64 * 4), 10 * layer)


def test_logits_beyond_what_is_kept_come_in_pieces() -> None:
    spec = ModelSpec.from_config(
        {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1 << 16}
    )  # fmt: skip
    few, many = MicroBatchShape(600, 512, 1), MicroBatchShape(9000, 8192, 1)
    assert logits_bytes(spec, few, FLOAT32) == 512 * 64 * 4 + 5 * 4 * 512 * 65536
    assert logits_bytes(spec, many, FLOAT32) == 8192 * 64 * 4 + 5 * 4 * (1 << 26)


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    assert micro_batch_shape(budget=100, prompt=80, response=80, rows=9) == MicroBatchShape(160, 80, 1)
    assert micro_batch_shape(budget=1000, prompt=10, response=90, rows=9) == MicroBatchShape(900, 810, 9)
    assert micro_batch_shape(budget=1000, prompt=10, response=90, rows=50) == MicroBatchShape(1000, 900, 10)
