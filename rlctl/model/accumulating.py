"""The gradient of a mini batch, summed over its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

import numpy as np
import torch

from rlctl.algorithms.aggregation import token_weights
from rlctl.algorithms.losses import Tokens
from rlctl.algorithms.objective import Objective
from rlctl.experience.rows import Floats, Row
from rlctl.model.base import LossSpec
from rlctl.model.micro_batches import MicroBatch
from rlctl.model.passes import Passes, empty, gather, scatter

Scores = tuple[torch.Tensor, torch.Tensor | None]
"""Log-probs (T,) and, where they are asked for, entropies (T,), float32."""
ScoreFn = Callable[[MicroBatch, float, bool], Scores]
"""(micro-batch, temperature, whether entropies are wanted) -> scores of its response tokens, with gradient."""


def accumulate(
    score: ScoreFn, passes: Passes, rows: Sequence[Row], loss: LossSpec
) -> tuple[dict[str, float], list[Floats]]:
    """Add the gradient of a mini batch's loss to the parameters' gradients.

    A token's share of the loss is that in the whole mini batch, so the sum over micro-batches, wherever they run, is
    the gradient of the mini batch.

    Returns:
        means of loss and metrics over the mini batch's trained tokens, and each row's log-probs.
    """
    lengths = torch.tensor([row.trained for row in rows])
    weights = token_weights(loss.aggregation, lengths, horizon=loss.horizon)
    count = int(lengths.sum())
    logprobs = empty(rows)
    sums: dict[str, float] = {"loss": 0.0}
    if loss.objective.needs_batch_first:
        loss = replace(loss, objective=knowing_batch(score, passes, rows, loss))
    passes.cuts = []
    for batch in passes.micro_batches(rows, _still(rows, loss.objective)):
        with passes.autocast(), torch.set_grad_enabled(not batch.still):
            values, entropy = score(batch, loss.temperature, loss.objective.needs_entropy)
        if batch.idle:
            (values.sum() * 0.0).backward()
            continue
        passes.cuts.append(batch.indices)
        scatter(values.detach(), batch, rows, logprobs)
        result = loss.objective(tokens_of(values, entropy, batch, rows, weights, loss))
        if not batch.still:
            result.loss.backward()
        sums["loss"] += result.loss.item() * count
        for name, value in result.sums.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    means = {name: value / max(count, 1) for name, value in passes.add_up(sums).items()}
    return means, passes.complete(rows, logprobs)


def _still(rows: Sequence[Row], objective: Objective) -> frozenset[int]:
    """Return the rows whose tokens have no gradient at all, as in a group of equal rewards: a third of their work is
    enough for their log-probs. None when all are such: the optimizer is owed a gradient, be it zero."""
    if not objective.follows_advantage:
        return frozenset()
    still = frozenset(i for i, row in enumerate(rows) if not row.advantages[row.mask].any())
    return still if len(still) < len(rows) else frozenset()


def knowing_batch(score: ScoreFn, passes: Passes, rows: Sequence[Row], loss: LossSpec) -> Objective:
    """Return the objective once it knows the mini batch, at the price of a forward pass."""
    values = passes.each_token(rows, lambda batch: score(batch, loss.temperature, False)[0])
    train = torch.from_numpy(np.concatenate(values))
    rollout = torch.from_numpy(np.concatenate([row.rollout_logprobs for row in rows]))
    mask = torch.from_numpy(np.concatenate([row.mask for row in rows]))
    row = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(r.response_ids) for r in rows]))
    return loss.objective.for_mini_batch(train[mask], rollout[mask], row[mask])


def tokens_of(
    values: torch.Tensor,
    entropy: torch.Tensor | None,
    batch: MicroBatch,
    rows: Sequence[Row],
    weights: torch.Tensor,
    loss: LossSpec,
) -> Tokens:
    """Return the trained tokens of a micro-batch."""
    device = values.device
    chosen = [rows[i] for i in batch.indices]
    take = partial(gather, rows, batch, device=device)
    known = all(row.old_logprobs is not None for row in chosen)
    weighed = all(row.importance is not None for row in chosen)
    tokens = Tokens(
        logprobs=values,
        old_logprobs=take(lambda row: row.old_logprobs) if known else values.detach(),
        advantages=take(lambda row: row.advantages),
        weights=weights[torch.tensor(batch.indices)].to(device)[batch.row],
        row=batch.row,
        importance=take(lambda row: row.importance) if weighed else None,
        rollout_logprobs=take(lambda row: row.rollout_logprobs) if loss.objective.needs_rollout_logprobs else None,
        ref_logprobs=take(lambda row: row.ref_logprobs) if loss.objective.kl is not None else None,
        entropy=entropy,
    )
    if all(row.trained == len(row.response_ids) for row in chosen):
        return tokens
    return select(tokens, torch.from_numpy(np.concatenate([row.mask for row in chosen])).to(device))


def select(tokens: Tokens, mask: torch.Tensor) -> Tokens:
    """Return the tokens that ``mask`` (bool, (T,)) names."""
    parts = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return replace(tokens, **{name: part[mask] for name, part in parts.items() if part is not None})
