"""Groups without signal leave a step before it trains, each replaced by a new prompt (DAPO's dynamic sampling)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlctl.algorithms.filtering import has_signal
from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Evicted, Noted
from rlctl.experience.groups import PromptGroup
from rlctl.experience.schedule_events import Retained
from rlctl.schema import Config
from rlctl.schema.algorithm import Overlong
from rlctl.tasks.base import Sample
from rlctl.trainers.overlong import counted
from rlctl.trainers.step import StepState


class Prompts(Protocol):
    """Where new prompts come from."""

    @property
    def remaining(self) -> int | None:
        """Prompts left; None when there is no end."""

    def take(self, n: int) -> list[tuple[int, Sample]]:
        """Return the next ``n`` prompts with their ordinals, fewer at the end."""


class Submits(Protocol):
    """Where they go."""

    def submit(self, prompts: Sequence[tuple[int, Sample]], version: int) -> None:
        """Admit prompts."""

    def may_evict(self) -> bool:
        """Whether groups may be evicted now."""


class Refill:
    """Replaces finished groups whose rewards are all alike, one new prompt for each, so that neither too few nor too
    many groups are ever made.

    A step that has generated ``filter_max_batches`` train batches of prompts, or whose data has ended, keeps the
    others: it never waits for ever and never trains nothing. What it keeps, it tells.
    """

    def __init__(
        self, config: Config, buffer: GroupBuffer, cursor: Prompts, rollouter: Submits, events: EventLog
    ) -> None:
        self._buffer, self._cursor, self._rollouter, self._events = buffer, cursor, rollouter, events
        self._overlong = config.algorithm.overlong_responses
        self._limit = config.algorithm.filter_max_batches * config.trainer.prompts_per_step
        self._generated = 0
        self._evicted = 0
        self._kept: set[int] = set()
        self._rewards: list[float] = []

    def begin(self, step: StepState) -> None:
        """Count anew for a local update."""
        self._generated, self._evicted, self._kept, self._rewards = step.target, 0, set(), []

    def enough(self, step: StepState) -> bool:
        """Replace what can be replaced; return whether the step's groups are there. Called holding the buffer."""
        buffer = self._buffer
        if not self._rollouter.may_evict():
            return False
        for group in buffer.finished():
            if group.ordinal not in self._kept and not self._teaches(group):
                self._replace(group, step)
        return buffer.ready(step.target, step.number - 1)

    def end(self, step: StepState) -> None:
        """File the counts, and the mean reward of all that was generated for what is trained, which hides success."""
        for group in step.groups:
            self._rewards += _rewards(group)
        kept = sum(group.ordinal in self._kept for group in step.groups)
        step.metrics |= {
            "filter/generated_prompts": float(self._generated),
            "filter/evicted_groups": float(self._evicted),
            "filter/reward_generated": sum(self._rewards) / max(len(self._rewards), 1),
            "filter/kept_without_signal": float(kept),
        }
        if kept:
            message = (
                f"step {step.number}: {kept} groups without signal are trained, since {self._generated} "
                "prompts were generated (algorithm.filter_max_batches), or the data has ended"
            )
            self._events.emit(Noted(message=message))

    def _teaches(self, group: PromptGroup) -> bool:
        return has_signal(_rewards(group, self._overlong))

    def _replace(self, group: PromptGroup, step: StepState) -> None:
        taken = self._cursor.take(1) if self._generated < self._limit else []
        data_ended = self._cursor.remaining == 0
        if not taken and not (data_ended and len(self._buffer) > 1):
            self._kept.add(group.ordinal)
            self._events.emit(Retained(ordinal=group.ordinal))
            return
        self._rewards += _rewards(self._buffer.evict(group.ordinal))
        age = step.number - 1 - group.oldest_version
        self._events.emit(Evicted(ordinal=group.ordinal, why="no signal", age=age))
        self._evicted += 1
        self._rollouter.submit(taken, step.number - 1)
        self._generated += len(taken)
        # When the data has ended, the step may be shorter by one.
        step.target = min(step.target, len(self._buffer))


def _rewards(group: PromptGroup, overlong: Overlong = "truncate") -> list[float]:
    return [response.reward for response in counted(group, overlong) if response.reward is not None]
