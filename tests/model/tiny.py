"""Tiny models, random rows, and transformers' own log-probs of them."""

import random

import numpy as np
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from rlctl.algorithms.objective import Objective
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.model.base import LossSpec

VOCAB = 61
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "llama-tied": LlamaConfig(vocab_size=VOCAB, intermediate_size=48, tie_word_embeddings=True, **SMALL),
    "qwen2-untied": Qwen2Config(vocab_size=VOCAB, intermediate_size=48, tie_word_embeddings=False, **SMALL),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    ),
}
LOSS = LossSpec(Objective("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}), "token-mean", horizon=20)


def random_rows(count: int = 8) -> list[Row]:
    rows = []
    for index in range(count):
        prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, 6))]
        response = [random.randrange(VOCAB) for _ in range(random.randint(1, 20))]
        size = len(response)
        rows.append(
            Row(
                RequestKey(index // 4, index % 4), index // 4, prompt, response, random.random(),
                np.full(size, -2.0, np.float32), np.zeros(size, np.int64),
                advantages=np.full(size, random.uniform(-1, 1), np.float32),
            )
        )  # fmt: skip
    return rows


def logprobs_of(model, rows: list[Row]) -> list[np.ndarray]:
    found = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0].float()
        chosen = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
        found.append(chosen.gather(1, torch.tensor(row.response_ids)[:, None]).squeeze(1).numpy())
    return found
