"""Tiny random models for the rollout tests, and the teacher-forced forward that the engine is held to."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.rollout.embedded.engine import EmbeddedEngine

VOCAB = 67
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
}


def _rope(kind: str, **more: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


FUSED = {
    "llama": LlamaConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "llama-untied-biases": LlamaConfig(
        **_SIZES, num_attention_heads=4, num_key_value_heads=4, attention_bias=True, mlp_bias=True
    ),
    "llama-head-dim": LlamaConfig(**_SIZES, num_attention_heads=6, num_key_value_heads=1, head_dim=16),
    "llama-linear": LlamaConfig(
        **_SIZES, num_attention_heads=4, num_key_value_heads=2, rope_parameters=_rope("linear", factor=2.0)
    ),
    "llama-llama3": LlamaConfig(
        **_SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "qwen2": Qwen2Config(**_SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=20),
}
GENERIC = {
    "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=512, n_embd=48, n_layer=2, n_head=4),
    "gpt-neox": GPTNeoXConfig(**_SIZES, num_attention_heads=4),
    "mistral-window": MistralConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=8),
    "qwen2-window": Qwen2Config(
        **_SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    ),
    "llama-gelu": LlamaConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=2, hidden_act="gelu"),
    "llama-yarn": LlamaConfig(
        **_SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
}
# Models that keep more of past tokens than keys and values.
RECURRENT = {"mamba": MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2)}
EVERY = {**FUSED, **GENERIC, **RECURRENT}


def make_model(config: Any, seed: int) -> Any:
    """Return a transformers model in fp32 whose every weight is random, biases and norms included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.copy_(1 + 0.2 * torch.randn(parameter.shape) if "norm.weight" in name else parameter)
        if parameter.dim() > 1 or name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape) * 0.15)
    return model


def make_engine(model: Any, *, load: bool = True, dtype: torch.dtype = torch.float32, **more: Any) -> EmbeddedEngine:
    """Return an engine for a model, with its weights loaded as version 0."""
    engine = EmbeddedEngine(model.config, dtype=dtype, **{"max_length": 256, **more})
    if load:
        assert engine.load_weights(model.state_dict().items(), 0).complete
    return engine


def make_requests(count: int, seed: int, *, longest: int = 60, samples: int = 1, **params: Any) -> list[Request]:
    """Return requests with random prompts of 1-40 tokens and random limits; ``samples`` of them share a prompt."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    requests = []
    for ordinal in range(count // samples):
        prompt = tuple(torch.randint(0, VOCAB, (draw(1, 41),), generator=g).tolist())
        for sample in range(samples):
            sampling = SamplingParams(max_new_tokens=draw(1, longest + 1), **params)
            requests.append(Request(RequestKey(ordinal, sample), prompt, sampling, seed=seed))
    return requests


def teacher_forced(model: Any, request: Request, output: Output, temperature: float = 1.0) -> torch.Tensor:
    """Return [tokens] log-probs of an output's tokens under transformers' forward of the whole sequence."""
    ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
    chosen = ids[0, len(request.prompt_ids) :, None]
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, chosen)[:, 0]


def finish(engine: EmbeddedEngine) -> list[Output]:
    """Step until nothing runs."""
    outputs = []
    while engine.num_running:
        outputs.extend(engine.step())
    return outputs
