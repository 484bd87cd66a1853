"""From logits to tokens: temperature, top-k, top-p, and the inverse of the cumulative distribution in id order."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(
    logits: Tensor, noise: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, *, plain: bool
) -> tuple[Tensor, Tensor]:
    """Choose one token per row. A row's result does not depend on the other rows.

    Args:
        logits: [n, vocab].
        noise: [n] float32 uniforms in [0, 1).
        temperature: [n] float32; 0 takes the most likely token.
        top_p: [n] float32; 1 keeps all.
        top_k: [n] int64; 0 keeps all.
        plain: the caller's word that every row has temperature 1 and keeps all, which saves the work of finding out.

    Returns:
        [n] int64 token ids, and [n] float32 log-probs of them under the temperature-scaled distribution before any
        cut (temperature 1 for greedy rows).
    """
    logits = logits.float()
    if not plain:
        # Dividing by 1 is exact, so a row with temperature 1 has the same bits here as on the plain way.
        logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    weights = logprobs.exp()
    if not plain:
        cut = ((top_p < 1) | (top_k > 0)).nonzero()[:, 0]
        if len(cut):
            weights[cut] = _cut(weights[cut], top_p[cut], top_k[cut])
    cumulative = weights.cumsum(dim=-1)
    # The noise is below 1 by at least 2**-24, so the target stays below the total also after rounding, and the first
    # id whose cumulative weight exceeds it has a weight above 0.
    target = noise[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if not plain:
        greedy = logits.max(dim=-1, keepdim=True).indices
        tokens = torch.where(temperature[:, None] > 0, tokens, greedy)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _cut(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Set to 0 what top-k, then top-p over what is left, drop; of equal weights the lower id is kept first."""
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    ordered = ordered.masked_fill((top_k > 0)[:, None] & (rank >= top_k[:, None]), 0.0)
    before = ordered.cumsum(dim=-1) - ordered
    # The most likely token always stays, also when top_p is smaller than its weight.
    drop = (before >= top_p[:, None] * ordered.sum(dim=-1, keepdim=True)) & (top_p[:, None] < 1) & (rank > 0)
    return torch.zeros_like(weights).scatter_(1, ids, ordered.masked_fill(drop, 0.0))
