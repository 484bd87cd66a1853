"""A loss that its caller takes the gradient of, over ranks that each see their share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlctl.algorithms.aggregation import token_weights
from rlctl.experience.rows import Row
from rlctl.model.accumulating import knowing_batch, tokens_of
from rlctl.model.base import LossSpec
from rlctl.model.fsdp2.dealing import DealtPasses
from rlctl.model.fsdp2.sharding import Scoring, gathered_no_more


def differentiable_loss(root: Scoring, passes: DealtPasses, rows: Sequence[Row], loss: LossSpec) -> torch.Tensor:
    """Return the loss of ``rows``: a float32 scalar, the same on all ranks.

    Its ``backward``, which all ranks call, adds the gradient of the whole loss to the parameters' gradients. This
    rank's share goes through in one pass, so all its activations are kept until then.

    Args:
        root: the sharded model.
        passes: which rows are this rank's.
        rows: at least one; all ranks give the same.
        loss: what is minimised.
    """
    gathered_no_more(root)  # what an evaluation left gathered is older than the parameters may be
    weights = token_weights(loss.aggregation, torch.tensor([row.trained for row in rows]), horizon=loss.horizon)
    if loss.objective.needs_batch_first:
        loss = replace(loss, objective=knowing_batch(root, passes, rows, loss))
    batch = passes.share(rows)
    values, entropy = root(batch, loss.temperature, loss.objective.needs_entropy)
    if batch.idle:
        mine = values.sum() * 0.0
    else:
        mine = loss.objective(tokens_of(values, entropy, batch, rows, weights, loss)).loss
    if not torch.is_grad_enabled():
        gathered_no_more(root)
    # The value is that of all ranks, the gradient this rank's: the backward pass adds those up.
    whole: torch.Tensor = passes.total(mine).to(mine.dtype) + (mine - mine.detach())
    return whole
