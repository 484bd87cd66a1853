"""Tiny reward models: real transformers classifiers with random weights, in folders."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from rlctl.tasks.builtin_models import builtin_model_path


def actor_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(builtin_model_path("cycle-tiny"))


def save_reward_model(
    folder: Path, *, outputs: int = 1, tokenizer: Any | None = None, pad: bool = True, seed: int = 0, **sizes: int
) -> Path:
    """Write a random Qwen2 classifier with the built-in model's tokenizer, or the one given, and return the folder."""
    tokenizer = tokenizer or actor_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=outputs, pad_token_id=tokenizer.pad_token_id if pad else None,
        **sizes,
    )  # fmt: skip
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        model.score.weight.normal_(0, 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
