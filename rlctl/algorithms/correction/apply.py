"""The one function that corrects: used on a whole batch before the advantages (decoupled), and on a micro-batch's own
log-probs inside the loss (bypass)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.algorithms.correction.mismatch import mismatch_metrics
from rlctl.algorithms.correction.rejection import rejection_mask, rejection_metrics
from rlctl.algorithms.correction.settings import SECTION, Correction
from rlctl.algorithms.correction.weights import importance_weights, weight_metrics
from rlctl.algorithms.sequences import row_count
from rlctl.errors import RlctlError

PREFIX = "rollout_corr/"


class LogProbsError(RlctlError):
    """Log-probs that a correction needs are absent or do not belong to the tokens one to one."""


@dataclass(frozen=True)
class Corrected:
    """``weights``: float32 (T,), None without weighting. ``keep``: bool (T,), False for rejected tokens, whose weights
    stay as they are. ``metrics``: names begin with ``rollout_corr/``."""

    weights: torch.Tensor | None
    keep: torch.Tensor
    metrics: dict[str, float]


def correct(
    train: torch.Tensor | None,
    rollout: torch.Tensor | None,
    row: torch.Tensor,
    correction: Correction,
    *,
    measure: bool = True,
) -> Corrected:
    """Weigh and reject trained tokens by the gap between the two policies.

    Args:
        train: log-probs under the policy that is trained, float (T,), without gradient.
        rollout: log-probs that the rollout engine reported, float (T,).
        row: int64 (T,), sequence of each token.
        correction: what to do; an empty one gives None weights, keeps all and still measures.
        measure: fill in the metrics, which cost some waits for the device.

    Raises:
        LogProbsError: log-probs are missing, of another length, or not finite. Nothing is ever skipped or filled in.
    """
    for name, values in (("trainer", train), ("rollout", rollout)):
        _require(name, values, row)
    assert train is not None and rollout is not None
    keep = torch.ones_like(row, dtype=torch.bool)
    if not row.numel():
        return Corrected(None, keep, {})
    rows, weights, metrics = row_count(row), None, dict[str, float]()
    log_ratio = train.detach().double() - rollout.double()
    if correction.weighting is not None:
        weights, raw, factor = importance_weights(log_ratio, row, rows, correction.weighting)
        if measure:
            metrics |= weight_metrics(raw, weights * factor, row, rows, correction.weighting)
            metrics["rollout_is_batch_norm_factor"] = factor
    if correction.rejections:
        keep = rejection_mask(log_ratio, row, rows, correction.rejections)
        if measure:
            metrics |= rejection_metrics(log_ratio, row, rows, correction.rejections)
    if measure:
        metrics |= mismatch_metrics(train.detach(), rollout, row, rows)
    return Corrected(
        None if weights is None else weights.float(), keep, {PREFIX + name: value for name, value in metrics.items()}
    )


def _require(name: str, values: torch.Tensor | None, row: torch.Tensor) -> None:
    fix = "take a rollout engine that returns the log-prob of every sampled token, or a correction that needs none"
    if values is None:
        raise LogProbsError(f"rollout correction has no {name} log-probs", where=SECTION, fix=fix)
    if values.shape != row.shape:
        raise LogProbsError(
            f"{values.numel()} {name} log-probs for {row.numel()} tokens: they do not belong together",
            where=SECTION,
            fix=fix,
        )
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        place = int((~finite).nonzero()[0])
        raise LogProbsError(f"the {name} log-prob of token {place} is {float(values[place])}", where=SECTION, fix=fix)
