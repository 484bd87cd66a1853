"""The work of each stage. No stage knows which mode it runs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rlctl.errors import RlctlError
from rlctl.experience.events import Noted
from rlctl.experience.rows import Floats, Row
from rlctl.trainers.by_task import task_metrics
from rlctl.trainers.by_turn import turn_metrics
from rlctl.trainers.credit import assign_credit, measure_mismatch
from rlctl.trainers.failed_rewards import failure_messages, require_usable_rewards
from rlctl.trainers.overlong import rows_by_policy
from rlctl.trainers.parts import Parts
from rlctl.trainers.refill import Refill
from rlctl.trainers.scoring import add_scores
from rlctl.trainers.staleness import staleness
from rlctl.trainers.step import StepState
from rlctl.trainers.waiting import Waits

StageFn = Callable[[StepState], None]


class Stages:
    """The stages of a run, bound to its parts. ``table`` holds those that this configuration runs."""

    def __init__(
        self, parts: Parts, waits: Waits, *, on_sample: Callable[[StepState, Callable[[], None]], None]
    ) -> None:
        self._parts = parts
        self._waits = waits
        self._on_sample = on_sample
        self._algorithm = parts.algorithm
        self._refill = Refill(parts) if parts.config.algorithm.filter_groups else None
        self.table: Mapping[str, StageFn] = {
            "submit": self.submit,
            "generate": self.generate,
            "reward": self.reward,
            "balance": self.balance,
            "old_log_probs": self.old_log_probs,
            **({"ref_log_probs": self.ref_log_probs} if parts.reference is not None else {}),
            **({"values": self.values, "update_critic": self.update_critic} if parts.critic is not None else {}),
            "advantages": self.advantages,
            "update_actor": self.update_actor,
        }

    def submit(self, step: StepState) -> None:
        """Take as many prompts from the data as the admission allows and hand them to the rollout side. In the
        background that does this by itself, and none is left to take."""
        buffer, version = self._parts.buffer, step.number - 1
        with buffer.changed:
            if room := buffer.room(version):
                self._parts.rollouter.submit(self._parts.cursor.take(room), version)

    def generate(self, step: StepState) -> None:
        """Wait until enough whole groups are there and take them, between the two sample hooks; none at the end of the
        data."""
        buffer, rollouter, refill = self._parts.buffer, self._parts.rollouter, self._refill
        trainer, version = self._parts.config.trainer, step.number - 1
        step.target = rollouter.attainable(trainer.prompts_per_step // (trainer.parameter_sync_step or 1), version)

        def enough() -> bool:
            if refill is not None and not refill.enough(step):
                return False
            self.submit(step)
            if buffer.ready(step.target, version):
                return True
            # Groups may have left because of their age, and the data may have ended meanwhile.
            step.target = rollouter.attainable(step.target, version)
            return buffer.ready(step.target, version)

        def sample() -> None:
            if refill is not None:
                refill.begin(step)
            self._waits.until(enough)
            step.groups = rollouter.select(step.target, step=step.number, version=version)
            if refill is not None:
                refill.end(step)

        self._on_sample(step, sample)
        stats = self._parts.rollouter.take_stats()
        step.metrics["generated_tokens"] = float(stats.tokens)
        step.metrics["rollout_seconds"] = stats.seconds
        step.metrics["aborted_requests"] = float(stats.aborted)
        step.metrics["resumed_tokens"] = float(stats.kept_tokens)
        step.metrics["aborted_tokens"] = float(stats.kept_tokens + stats.lost_tokens)
        step.metrics["failed_rewards"] = float(sum(stats.failed_rewards.values()))
        for message in failure_messages(stats):
            self._parts.events.emit(Noted(message=f"step {step.number}: {message}"))
        require_usable_rewards(stats)

    def reward(self, step: StepState) -> None:
        """Turn groups into rows, which must have their task's reward and their log-probs by now, and add the reward
        model's scores."""
        step.rows, cut = rows_by_policy(step.groups, self._parts.config.algorithm.overlong_responses)
        if self._parts.reward_model is not None:
            step.metrics |= add_scores(step.rows, step, self._parts)
        rewards = [row.reward for row in step.rows]
        lengths = [len(row.response_ids) for row in step.rows]
        step.metrics |= {
            "prompts": float(len(step.groups)),
            "samples": float(len(step.rows)),
            "reward": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
            "response_tokens": float(np.mean(lengths)),
            "response_tokens_max": float(np.max(lengths)),
            **cut,
            **staleness(step.rows, step.number - 1),
            **turn_metrics(step.rows),
            **task_metrics(step.groups),
        }

    def balance(self, step: StepState) -> None:
        """Cut the batch into mini batches of whole groups, in key order."""
        size = self._parts.config.trainer.mini_batch_prompts or len(step.groups)
        ordinals = sorted({row.group for row in step.rows})
        step.mini_batches = []
        for start in range(0, len(ordinals), size):
            chosen = set(ordinals[start : start + size])
            step.mini_batches.append([row for row in step.rows if row.group in chosen])

    def old_log_probs(self, step: StepState) -> None:
        """Fill the old policy's log-probs: the rollout's, or recomputed ones.

        With a single optimizer step the old policy is the one that the update runs forward anyway: its own log-probs,
        detached, are the old ones bit for bit, and no pass is spent here unless something needs them before. In a step
        of several local updates the old policy is that of the last sync: it is kept before the first of them.
        """
        if not self._algorithm.bypass and not step.round and (self._parts.config.trainer.parameter_sync_step or 1) > 1:
            self._parts.model.keep_policy()
        if self._algorithm.bypass:
            for row in step.rows:
                row.old_logprobs = row.rollout_logprobs
        elif step.round:
            self._fill_old(step, self._parts.model.kept_log_probs(step.rows, temperature=self._algorithm.temperature))
        elif self._algorithm.must_recompute(len(step.mini_batches)):
            self._fill_old(step, self._parts.model.log_probs(step.rows, temperature=self._algorithm.temperature))

    def ref_log_probs(self, step: StepState) -> None:
        """Fill the reference model's log-probs."""
        assert self._parts.reference is not None
        values = self._parts.reference.log_probs(step.rows, temperature=self._algorithm.temperature)
        for row, value in zip(step.rows, values, strict=True):
            row.ref_logprobs = value

    def values(self, step: StepState) -> None:
        """Fill the critic's values."""
        assert self._parts.critic is not None
        for row, value in zip(step.rows, self._parts.critic.values(step.rows), strict=True):
            row.values = value

    def update_critic(self, step: StepState) -> None:
        """Take one optimizer step of the critic for each mini batch."""
        assert self._parts.critic is not None
        clip = self._parts.config.algorithm.critic.value_clip
        for rows in step.mini_batches:
            for name, value in self._parts.critic.update(rows, clip=clip).items():
                step.metrics[name] = step.metrics.get(name, 0.0) + value / len(step.mini_batches)

    def advantages(self, step: StepState) -> None:
        """Fill each token's advantage from the rewards."""
        step.metrics |= assign_credit(step.rows, self._algorithm)

    def update_actor(self, step: StepState) -> None:
        """Take one optimizer step for each mini batch, once the critic is warm."""
        if self._parts.critic is not None and step.number <= self._parts.config.algorithm.critic.warmup_steps:
            tokens = sum(row.length for row in step.rows)
            step.metrics |= {"trained_tokens": float(tokens), "updates": 0.0, "skipped_updates": 0.0}
            return
        train: list[Floats] = []
        tokens, totals = 0, dict[str, float]()
        loss = self._algorithm.loss_spec()
        for rows in step.mini_batches:
            result = self._parts.model.update(rows, loss)
            tokens += result.tokens
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
