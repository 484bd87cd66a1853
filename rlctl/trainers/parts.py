"""What a trainer is given. It knows these by what they do, never by a backend's or an engine's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_log import EventLog
from rlctl.model.base import ModelEngine
from rlctl.model.critic.base import Critic
from rlctl.model.reference import Reference
from rlctl.model.reward.scorer import ResponseScorer
from rlctl.rollout.rollouter import Rollouter
from rlctl.runtime.checkpoints import Checkpoints, Stateful
from rlctl.runtime.signals import StopSignal
from rlctl.schema import Config
from rlctl.tasks.base import Sample
from rlctl.tasks.cursor import PromptCursor
from rlctl.trainers.algorithm import Algorithm


@dataclass
class Parts:
    """The parts of a run, built once.

    Attributes:
        config: resolved; the mode's defaults are filled in.
        total_steps: steps that the run has in all.
        cursor: position in the data.
        held_out: prompts of an evaluation; empty evaluates nothing.
        sync_weights: brings all replicas to a version.
        sleep_replicas: lets the rollout side give its memory back.
        stop: set by a signal.
        checkpoints: where checkpoints go.
        algorithm: what the configuration's ``algorithm`` section means for a step.
        reference: scores responses for the KL; None without one.
        critic: says what states are worth; None without one.
        reward_model: says what responses are worth, beside the task; None without one.
    """

    config: Config
    total_steps: int
    cursor: PromptCursor
    held_out: Sequence[Sample]
    buffer: GroupBuffer
    rollouter: Rollouter
    model: ModelEngine
    sync_weights: Callable[[int], None]
    sleep_replicas: Callable[[], None]
    events: EventLog
    checkpoints: Checkpoints
    stop: StopSignal
    algorithm: Algorithm
    reference: Reference | None = None
    critic: Critic | None = None
    reward_model: ResponseScorer | None = None

    def saved(self) -> dict[str, Stateful]:
        """Return what a checkpoint holds beside the trainer's own state."""
        critic: dict[str, Stateful] = {} if self.critic is None else {"critic": self.critic}
        parts: dict[str, Stateful] = {"model": self.model, "cursor": self.cursor, "buffer": self.buffer}
        return {**parts, "algorithm": self.algorithm, **critic}
