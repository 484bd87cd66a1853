"""What ``algorithm.*`` means for a step, decided in one place: which log-probs are the old ones, where a correction
acts, what the loss is. Every mode trains by it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlctl.algorithms.advantages import Advantages, RewardedBatch
from rlctl.algorithms.correction.settings import Correction, parse_correction
from rlctl.algorithms.divergence import KlCoefficient
from rlctl.algorithms.objective import Objective
from rlctl.algorithms.options import options_of
from rlctl.algorithms.registry import ADVANTAGES
from rlctl.model.base import LossSpec
from rlctl.schema import Config
from rlctl.schema.algorithm import RolloutCorrectionConfig


def correction_of(section: RolloutCorrectionConfig) -> Correction:
    """Return the correction of the configuration. Raises UsageError under the key that is wrong."""
    return parse_correction(
        section.rollout_is,
        section.rollout_is_threshold,
        section.rollout_is_batch_normalize,
        section.rollout_rs,
        section.rollout_rs_threshold,
    )


class Algorithm:
    """The algorithm of a run, with the one thing in it that moves: the weight of the KL.

    Attributes:
        bypass: the old policy is the rollout's (``trainer.old_log_probs: rollout``); a correction acts in the loss, on
            each pass's own log-probs. Otherwise (decoupled) it acts on the recomputed old log-probs, before the
            advantages.
        correction: weights and rejections; may be empty.
        kl: weight of the KL, in the loss or in the reward.
    """

    def __init__(self, config: Config) -> None:
        settings = config.algorithm
        self._settings = settings
        self._options = asdict(settings)
        self._estimator = ADVANTAGES.load(settings.advantage, where="algorithm.advantage")
        self._horizon = config.rollout.max_new_tokens
        self.temperature = config.rollout.temperature
        self.bypass = config.trainer.old_log_probs == "rollout"
        self.correction = correction_of(settings.rollout_correction)
        self.kl = KlCoefficient(settings.kl.coef, settings.kl.target, settings.kl.horizon)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model must score the responses."""
        return self._settings.kl.place != "none"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is a penalty on the reward of each token."""
        return self._settings.kl.place == "reward"

    @property
    def kl_estimator(self) -> str:
        """Name of the KL's estimator."""
        return self._settings.kl.estimator

    @property
    def corrects_first(self) -> bool:
        """Whether the correction acts before the advantages (decoupled), not in the loss."""
        return self.correction.active and not self.bypass

    def must_recompute(self, updates: int) -> bool:
        """Whether the old policy's log-probs need a pass of their own.

        With one update, and nothing that uses them before it, they are those of the update's own forward pass.
        """
        return not self.bypass and (updates > 1 or self.corrects_first or self.kl_in_reward)

    def advantages(self, batch: RewardedBatch) -> Advantages:
        """Return the advantages of a batch. Raises UsageError when the estimator lacks what it needs."""
        return self._estimator(batch, **options_of(self._estimator, self._options))

    def loss_spec(self) -> LossSpec:
        """Return what an update minimises now."""
        settings = self._settings
        return LossSpec(
            objective=Objective(
                loss=settings.loss,
                options=self._options,
                bypass=self.bypass,
                correction=self.correction,
                kl=settings.kl.estimator if settings.kl.place == "loss" else None,
                kl_coef=self.kl.value,
                entropy_coef=settings.entropy_coef,
            ),
            aggregation=settings.aggregation,
            horizon=self._horizon,
            temperature=self.temperature,
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"kl": self.kl.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from an earlier ``state()``; a weight that is fixed is the configuration's."""
        if self.kl.target is not None:
            self.kl.load(state["kl"])
