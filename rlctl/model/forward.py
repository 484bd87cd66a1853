"""Log-probs, and entropies where they are asked for, of response tokens under any transformers causal LM."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rlctl.model.micro_batches import MicroBatch

# Families whose logits are exactly lm_head(last hidden state). Others scale or cap their logits inside the model, so
# they run whole.
PLAIN_HEAD = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_neox", "phi3"})
# Logits above this many elements are recomputed in the backward pass instead of being kept.
_KEEP_LOGITS = 1 << 26


def response_log_probs(model: Any, batch: MicroBatch, *, temperature: float) -> torch.Tensor:
    """Return float32 log-probs of shape (T,) for the response tokens of ``batch``."""
    return response_scores(model, batch, temperature=temperature, entropy=False)[0]


def response_scores(
    model: Any, batch: MicroBatch, *, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return float32 log-probs (T,) of the response tokens, and with ``entropy`` the entropy (T,), in nats, of the
    distribution that each was drawn from."""
    scale = temperature if temperature > 0 else 1.0
    if model.config.model_type not in PLAIN_HEAD:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
        return _scores(logits.flatten(0, 1)[batch.positions].float() / scale, batch.targets, entropy)
    hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    chosen = hidden.flatten(0, 1)[batch.positions]
    head = model.get_output_embeddings()
    step = max(1, _KEEP_LOGITS // head.weight.shape[0])
    if chosen.shape[0] <= step:
        return _scores(head(chosen).float() / scale, batch.targets, entropy)
    pieces = []
    for start in range(0, chosen.shape[0], step):
        part = slice(start, start + step)
        pieces.append(
            checkpoint(_head_scores, head, chosen[part], batch.targets[part], scale, entropy, use_reentrant=False)
        )
    logprobs = torch.cat([piece[0] for piece in pieces])
    return logprobs, torch.cat([piece[1] for piece in pieces]) if entropy else None


def _head_scores(
    head: Any, hidden: torch.Tensor, targets: torch.Tensor, scale: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _scores(head(hidden).float() / scale, targets, entropy)


def _scores(logits: torch.Tensor, targets: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log softmax(logits)[target] and the entropy: logits float32 (T, V), targets int64 (T,)."""
    norm = torch.logsumexp(logits, dim=1)
    logprobs = logits.gather(1, targets[:, None]).squeeze(1) - norm
    if not entropy:
        return logprobs, None
    return logprobs, norm - ((logits - norm[:, None]).exp() * logits).sum(1)
