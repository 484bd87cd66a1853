"""What an update minimises: the policy loss, its correction under bypass, the KL term and the entropy bonus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlctl.algorithms.correction.apply import PREFIX, correct
from rlctl.algorithms.correction.settings import Correction
from rlctl.algorithms.divergence import kl_estimate
from rlctl.algorithms.losses import LossResult, Tokens
from rlctl.algorithms.options import options_of
from rlctl.algorithms.registry import LOSSES
from rlctl.algorithms.traits import follows_advantage, has_ratio


@dataclass(frozen=True)
class Objective:
    """The terms of the loss, by name, so that it can be sent to another process.

    Attributes:
        loss: entry of ``LOSSES``.
        options: settings; a loss takes those that its signature names.
        bypass: the old policy is the rollout's; ``correction`` then acts on each pass's own log-probs.
        correction: of a bypass. Rejected tokens weigh nothing, and the others' shares stay as they are. A loss with a
            ratio takes no weights, since its ratio is pi / pi_rollout already.
        weight_factor: what a bypass divides its weights by; see ``for_mini_batch``.
        kl: estimator of the KL term, None for no term.
        kl_coef: its weight.
        entropy_coef: weight of the entropy bonus; 0 for none.
    """

    loss: str
    options: Mapping[str, Any] = field(default_factory=dict)
    bypass: bool = False
    correction: Correction = field(default_factory=Correction)
    weight_factor: float = 1.0
    kl: str | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    @property
    def needs_rollout_logprobs(self) -> bool:
        """Whether ``Tokens.rollout_logprobs`` must be there."""
        return self.bypass and self.correction.active

    @property
    def needs_entropy(self) -> bool:
        """Whether ``Tokens.entropy`` must be there."""
        return self.entropy_coef != 0.0

    @property
    def needs_batch_first(self) -> bool:
        """Whether the weights of a whole mini batch must be known before its first pass: see ``for_mini_batch``."""
        weighting = self.correction.weighting
        return self.bypass and weighting is not None and weighting.batch_normalize

    @property
    def follows_advantage(self) -> bool:
        """Whether a token whose advantage is 0 has no gradient."""
        return self.kl is None and not self.needs_entropy and follows_advantage(self.loss)

    def for_mini_batch(self, train: torch.Tensor, rollout: torch.Tensor, row: torch.Tensor) -> Objective:
        """Return this objective with the mean weight of a mini batch, whose log-probs (T,) are given, to divide by."""
        assert self.correction.weighting is not None
        metrics = correct(train, rollout, row, self.correction).metrics
        plain = replace(self.correction, weighting=replace(self.correction.weighting, batch_normalize=False))
        return replace(self, correction=plain, weight_factor=metrics.get(PREFIX + "rollout_is_batch_norm_factor", 1.0))

    def __call__(self, tokens: Tokens) -> LossResult:
        """Return the loss of a micro-batch: policy loss + kl_coef * KL - entropy_coef * entropy, each term a mean by
        the tokens' shares. Raises LogProbsError when a correction lacks its log-probs."""
        sums: dict[str, torch.Tensor] = {}
        if self.needs_rollout_logprobs:
            tokens = self._corrected(tokens)
        loss_fn = LOSSES.load(self.loss)
        result = loss_fn(tokens, **options_of(loss_fn, self.options))
        loss = result.loss
        if self.kl is not None:
            assert tokens.ref_logprobs is not None, "a KL term without a reference model"
            kl = kl_estimate(tokens.logprobs, tokens.ref_logprobs, self.kl)
            loss = loss + self.kl_coef * (kl * tokens.weights).sum()
            sums["kl_loss"] = kl.detach().sum()
        if self.needs_entropy:
            assert tokens.entropy is not None, "an entropy bonus without entropies"
            loss = loss - self.entropy_coef * (tokens.entropy * tokens.weights).sum()
            sums["entropy"] = tokens.entropy.detach().sum()
        return LossResult(loss, result.sums | sums)

    def _corrected(self, tokens: Tokens) -> Tokens:
        found = correct(tokens.logprobs, tokens.rollout_logprobs, tokens.row, self.correction, measure=False)
        weights = None if found.weights is None or has_ratio(self.loss) else found.weights / self.weight_factor
        return replace(tokens, weights=tokens.weights * found.keep, importance=weights)
