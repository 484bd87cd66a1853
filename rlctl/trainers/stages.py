"""The work of the stages that need a live run: prompts in, rewarded rows out. No stage knows which mode it runs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlctl.experience.events import Noted
from rlctl.experience.schedule_events import Admitted, Wanted
from rlctl.trainers.batch_figures import batch_figures
from rlctl.trainers.by_task import task_metrics
from rlctl.trainers.failed_rewards import failure_messages, require_usable_rewards
from rlctl.trainers.overlong import rows_by_policy
from rlctl.trainers.parts import Parts
from rlctl.trainers.refill import Refill
from rlctl.trainers.scoring import add_scores
from rlctl.trainers.step import StepState
from rlctl.trainers.training import TrainingStages
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
        self._refill = None
        if parts.config.algorithm.filter_groups:
            self._refill = Refill(parts.config, parts.buffer, parts.cursor, parts.rollouter, parts.events)
        self.table: Mapping[str, StageFn] = {
            "submit": self.submit,
            "generate": self.generate,
            "reward": self.reward,
            **TrainingStages(parts.config, parts.algorithm, parts.model, parts.reference, parts.critic).table,
        }

    def submit(self, step: StepState) -> None:
        """Take as many prompts from the data as the admission allows and hand them to the rollout side. In the
        background that does this by itself, and none is left to take."""
        buffer, version = self._parts.buffer, step.number - 1
        with buffer.changed:
            if room := buffer.room(version):
                prompts = self._parts.cursor.take(room)
                if prompts:
                    self._parts.events.emit(Admitted(version=version, room=room, taken=len(prompts), by="step"))
                self._parts.rollouter.submit(prompts, version)

    def generate(self, step: StepState) -> None:
        """Wait until enough whole groups are there and take them, between the two sample hooks; none at the end of the
        data."""
        buffer, rollouter, refill = self._parts.buffer, self._parts.rollouter, self._refill
        trainer, version = self._parts.config.trainer, step.number - 1
        with buffer.changed:
            step.target = rollouter.attainable(trainer.prompts_per_step // (trainer.parameter_sync_step or 1), version)
            self._parts.events.emit(Wanted(step=step.number, round=step.round, groups=step.target))

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
        step.metrics |= {
            "prompts": float(len(step.groups)),
            **batch_figures(step.rows, step.number - 1),
            **cut,
            **task_metrics(step.groups),
        }
