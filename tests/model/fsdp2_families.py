"""Tiny models of the families that FSDP2 spreads."""

from __future__ import annotations

from transformers import Qwen3Config, Qwen3MoeConfig

from tests.model.tiny import CONFIGS, SMALL, VOCAB

QWEN3 = Qwen3Config(vocab_size=VOCAB, intermediate_size=48, tie_word_embeddings=True, head_dim=8, **SMALL)
EXPERTS = Qwen3MoeConfig(
    vocab_size=VOCAB, intermediate_size=48, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, head_dim=8,
    tie_word_embeddings=False, **SMALL,
)  # fmt: skip
KINDS = {"llama-tied": CONFIGS["llama-tied"], "qwen2-untied": CONFIGS["qwen2-untied"], "qwen3-tied": QWEN3}
WHOLE_LAYERS = {"gpt2": CONFIGS["gpt2"], "qwen3-moe": EXPERTS}
"""Families that FSDP2 alone spreads."""
