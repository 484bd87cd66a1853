"""The advantage stage: penalties, correction, advantages. It works on rows and knows no engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlctl.algorithms.advantages import RewardedBatch
from rlctl.algorithms.correction.apply import correct
from rlctl.algorithms.divergence import kl_estimate
from rlctl.algorithms.filtering import has_signal
from rlctl.algorithms.shaping import token_rewards
from rlctl.experience.rows import Floats, Row
from rlctl.trainers.algorithm import Algorithm
from rlctl.trainers.flat_rows import FlatRows


def assign_credit(rows: Sequence[Row], algorithm: Algorithm) -> dict[str, float]:
    """Fill advantages (and returns, weights, masks) of a train batch; return metrics.

    In this order: the KL penalty, the decoupled correction (whose rejections are no longer trained), the advantages.

    Raises:
        LogProbsError: a correction or penalty lacks log-probs.
        UsageError: the estimator lacks values.
    """
    metrics = {"groups_without_signal": float(_groups_without_signal(rows))}
    flat, penalty = FlatRows.of(rows), None
    if algorithm.kl_in_reward:
        old, ref = flat.column(lambda row: row.old_logprobs), flat.column(lambda row: row.ref_logprobs)
        assert old is not None and ref is not None, "a KL penalty needs old and reference log-probs"
        penalty = kl_estimate(old, ref, algorithm.kl_estimator)
        metrics["kl_reward"] = float(penalty[flat.mask].sum() / flat.mask.sum().clamp(min=1))
    scores = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    shaped = token_rewards(scores, flat.row, kl=penalty, kl_coef=algorithm.kl.value, mask=flat.mask)
    if algorithm.corrects_first:
        metrics |= _correct(rows, algorithm)
        flat = FlatRows.of(rows)
    batch = RewardedBatch(
        token_rewards=shaped,
        groups=torch.tensor([row.group for row in rows]),
        row=flat.row,
        mask=flat.mask,
        values=flat.column(lambda row: row.values),
    )
    found = algorithm.advantages(batch)
    for row, value in zip(rows, flat.split(found.advantages), strict=True):
        row.advantages = value
    if found.returns is not None:
        for row, value in zip(rows, flat.split(found.returns), strict=True):
            row.returns = value
    return metrics


def _correct(rows: Sequence[Row], algorithm: Algorithm) -> dict[str, float]:
    """Weigh and reject by the recomputed old log-probs against the rollout's."""
    flat = FlatRows.of(rows)
    old, rollout = flat.column(lambda row: row.old_logprobs), flat.column(lambda row: row.rollout_logprobs)
    mask = flat.mask
    found = correct(
        None if old is None else old[mask],
        None if rollout is None else rollout[mask],
        flat.row[mask],
        algorithm.correction,
    )
    kept = mask.clone()
    kept[mask] = found.keep
    for row, value in zip(rows, flat.split(kept), strict=True):
        row.mask = value
    if found.weights is not None:
        weights = torch.ones(mask.numel())
        weights[mask] = found.weights
        for row, value in zip(rows, flat.split(weights), strict=True):
            row.importance = value
    return found.metrics


def measure_mismatch(rows: Sequence[Row], train: Sequence[Floats], algorithm: Algorithm) -> dict[str, float]:
    """Return how far rollout and trainer are apart on the trained tokens, and what the correction makes of it.

    Args:
        rows: of a train batch.
        train: log-probs of each row's tokens under the policy that was trained, as of each update.
        algorithm: whose correction is reported.
    """
    flat = FlatRows.of(rows)
    logprobs = flat.column(lambda row: row.rollout_logprobs)
    trained = torch.cat([torch.from_numpy(values) for values in train])
    rollout = None if logprobs is None else logprobs[flat.mask]
    return correct(trained[flat.mask], rollout, flat.row[flat.mask], algorithm.correction).metrics


def _groups_without_signal(rows: Sequence[Row]) -> int:
    rewards: dict[int, list[float]] = {}
    for row in rows:
        rewards.setdefault(row.group, []).append(row.reward)
    return sum(not has_signal(group) for group in rewards.values())
