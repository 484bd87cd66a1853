"""The work of the stages from rewarded rows to new weights. They know models and rows, not where either came from: a
live run goes through them, and so does one that is told again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rlctl.errors import RlctlError
from rlctl.experience.rows import Floats, Row
from rlctl.model.base import ModelEngine
from rlctl.model.critic.base import Critic
from rlctl.model.reference import Reference
from rlctl.schema import Config
from rlctl.trainers.algorithm import Algorithm
from rlctl.trainers.credit import assign_credit, measure_mismatch
from rlctl.trainers.step import StepState

StageFn = Callable[[StepState], None]


class TrainingStages:
    """The stages behind the reward. ``table`` holds those that this configuration runs.

    Args:
        config: resolved.
        algorithm: what ``algorithm.*`` means for a step.
        model: that is trained.
        reference: scores responses for the KL; None without one.
        critic: says what states are worth; None without one.
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        model: ModelEngine,
        reference: Reference | None = None,
        critic: Critic | None = None,
    ) -> None:
        self._config = config
        self._algorithm = algorithm
        self._model = model
        self._reference = reference
        self._critic = critic
        self.table: Mapping[str, StageFn] = {
            "balance": self.balance,
            "old_log_probs": self.old_log_probs,
            **({"ref_log_probs": self.ref_log_probs} if reference is not None else {}),
            **({"values": self.values, "update_critic": self.update_critic} if critic is not None else {}),
            "advantages": self.advantages,
            "update_actor": self.update_actor,
        }

    def balance(self, step: StepState) -> None:
        """Cut the batch into mini batches of whole groups, in key order."""
        ordinals = sorted({row.group for row in step.rows})
        size = self._config.trainer.mini_batch_prompts or len(ordinals)
        step.mini_batches, step.micro_batches = [], []
        for start in range(0, len(ordinals), size):
            chosen = set(ordinals[start : start + size])
            step.mini_batches.append([row for row in step.rows if row.group in chosen])

    def old_log_probs(self, step: StepState) -> None:
        """Fill the old policy's log-probs: the rollout's, or recomputed ones.

        With a single optimizer step the old policy is the one that the update runs forward anyway: its own log-probs,
        detached, are the old ones bit for bit, and no pass is spent here unless something needs them before. In a step
        of several local updates the old policy is that of the last sync: it is kept before the first of them.
        """
        if not self._algorithm.bypass and not step.round and (self._config.trainer.parameter_sync_step or 1) > 1:
            self._model.keep_policy()
        if self._algorithm.bypass:
            for row in step.rows:
                row.old_logprobs = row.rollout_logprobs
        elif step.round:
            self._fill_old(step, self._model.kept_log_probs(step.rows, temperature=self._algorithm.temperature))
        elif self._algorithm.must_recompute(len(step.mini_batches)):
            self._fill_old(step, self._model.log_probs(step.rows, temperature=self._algorithm.temperature))

    def ref_log_probs(self, step: StepState) -> None:
        """Fill the reference model's log-probs."""
        assert self._reference is not None
        values = self._reference.log_probs(step.rows, temperature=self._algorithm.temperature)
        for row, value in zip(step.rows, values, strict=True):
            row.ref_logprobs = value

    def values(self, step: StepState) -> None:
        """Fill the critic's values."""
        assert self._critic is not None
        for row, value in zip(step.rows, self._critic.values(step.rows), strict=True):
            row.values = value

    def update_critic(self, step: StepState) -> None:
        """Take one optimizer step of the critic for each mini batch."""
        assert self._critic is not None
        clip = self._config.algorithm.critic.value_clip
        for rows in step.mini_batches:
            for name, value in self._critic.update(rows, clip=clip).items():
                step.metrics[name] = step.metrics.get(name, 0.0) + value / len(step.mini_batches)

    def advantages(self, step: StepState) -> None:
        """Fill each token's advantage from the rewards."""
        step.metrics |= assign_credit(step.rows, self._algorithm)

    def update_actor(self, step: StepState) -> None:
        """Take one optimizer step for each mini batch, once the critic is warm."""
        if self._critic is not None and step.number <= self._config.algorithm.critic.warmup_steps:
            tokens = sum(row.length for row in step.rows)
            step.metrics |= {"trained_tokens": float(tokens), "updates": 0.0, "skipped_updates": 0.0}
            return
        train: list[Floats] = []
        tokens, totals = 0, dict[str, float]()
        loss = self._algorithm.loss_spec()
        for rows in step.mini_batches:
            result = self._model.update(rows, loss)
            tokens += result.tokens
            step.micro_batches.append(result.micro_batches)
            for row, logprobs in zip(rows, result.logprobs, strict=True):
                row.train_logprobs = logprobs
            train += result.logprobs
            for name, value in result.metrics.items():
                totals[name] = totals.get(name, 0.0) + value / len(step.mini_batches)
        if not np.isfinite(totals["loss"]):
            raise RlctlError(
                f"the loss of step {step.number} is {totals['loss']}",
                fix="lower trainer.optimizer.lr, or look at the rewards; continue from the last checkpoint by --resume",
            )
        if self._algorithm.needs_reference:
            step.metrics["kl_coef"] = self._algorithm.kl.value
            self._algorithm.kl.update(totals.get("kl_loss", step.metrics.get("kl_reward", 0.0)), len(step.rows))
        trained = [row for rows in step.mini_batches for row in rows]
        step.metrics |= totals
        step.metrics |= self._gap(trained, train)
        step.metrics |= {"trained_tokens": float(tokens), "updates": float(len(step.mini_batches))}

    def _fill_old(self, step: StepState, values: list[Floats]) -> None:
        for row, value in zip(step.rows, values, strict=True):
            row.old_logprobs = value

    def _gap(self, rows: list[Row], train: list[Floats]) -> dict[str, float]:
        """Return how far the rollout is from the old policy, or, where that has no log-probs of its own, from the
        policy of each update."""
        policy = [
            value if row.old_logprobs is None or self._algorithm.bypass else row.old_logprobs
            for row, value in zip(rows, train, strict=True)
        ]
        gap = np.concatenate(
            [np.abs(p - row.rollout_logprobs)[row.sampled] for p, row in zip(policy, rows, strict=True)]
        )
        metrics = {"logprob_gap": float(gap.mean()), "logprob_gap_max": float(gap.max())}
        return metrics if self._algorithm.corrects_first else metrics | measure_mismatch(rows, policy, self._algorithm)
