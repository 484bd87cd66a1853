"""What the ranks of a replica do in the tests of the tensor-parallel engine."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from rlctl.hybrid.tp.engine import TensorParallelEngine
from rlctl.hybrid.tp.group import TensorGroup, replicas
from rlctl.rollout.base import Output
from tests.rollout.tiny import make_model, make_requests

SIZES: dict[str, Any] = {"vocab_size": 67, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80}
MODELS = {
    "llama": LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=4, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "one-kv-head": LlamaConfig(**SIZES, num_attention_heads=8, num_key_value_heads=1, head_dim=16),
    "qwen2": Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, num_attention_heads=8, num_key_value_heads=2, head_dim=20, tie_word_embeddings=True),
    # Which 4 ranks cannot share evenly, the first not 2 either; of the second a key-value head's queries are cut.
    "odd": Qwen2Config(
        **SIZES | {"intermediate_size": 81}, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=False
    ),
    "odd-groups": Qwen3Config(
        **SIZES | {"intermediate_size": 82}, num_attention_heads=6, num_key_value_heads=2, head_dim=20,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


@cache
def group_of(tp: int) -> dist.ProcessGroup | None:
    return replicas(range(dist.get_world_size()), tp)


def engine_of(name: str, seed: int, tp: int, **options: Any) -> TensorParallelEngine:
    model = make_model(MODELS[name], seed)
    engine = TensorParallelEngine(
        model.config, group=TensorGroup(group_of(tp)), dtype=torch.float32, max_length=256, **options
    )
    assert engine.load_weights(model.state_dict().items(), 0).complete
    return engine


def plain(outputs: list[Output]) -> list[Any]:
    return [[list(o.key), o.token_ids, o.logprobs, o.finish_reason] for o in outputs]


def generate(name: str, seed: int, tp: int, requests: dict[str, Any], **options: Any) -> dict[str, Any]:
    engine = engine_of(name, seed, tp, **options)
    outputs = engine.generate(make_requests(**requests))
    cache = sum(t.nbytes for t in (engine._decoder._keys, engine._decoder._values))
    weights = sum(t.nbytes for t in engine._decoder.named_weights().values())
    said = engine.group.said
    return {
        "outputs": plain(outputs), "cache": cache, "weights": weights,
        "calls": said.calls, "said": said.nbytes, "rank": dist.get_rank(),
    }  # fmt: skip


def interrupted(name: str, seed: int, tp: int, requests: dict[str, Any]) -> list[Any]:
    """Sleep, wake, abort and go on in between."""
    engine = engine_of(name, seed, tp, max_slots=8)
    made = make_requests(**requests)
    engine.submit(made)
    done = [output for _ in range(5) for output in engine.step()]
    engine.sleep(1)
    engine.wake()
    done += [output for _ in range(5) for output in engine.step()]
    part = engine.abort([made[0].key])
    while engine.num_running:
        done += engine.step()
    return plain(sorted(done, key=lambda output: output.key)) + plain(part)


def digest_of_logits(name: str, seed: int, tp: int) -> str:
    engine = engine_of(name, seed, tp)
    logits = engine._decoder.prefill([tuple(range(1, 20)), (5,)])
    return hashlib.sha256(torch.stack([p.logits for p in logits]).numpy().tobytes()).hexdigest()
