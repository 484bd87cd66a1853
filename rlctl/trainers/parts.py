"""What a trainer is given. It knows these by what they do, never by a backend's or an engine's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
from rlctl.sync.report import SyncReport
from rlctl.tasks.base import Sample
from rlctl.tasks.cursor import PromptCursor
from rlctl.trainers.algorithm import Algorithm
from rlctl.trainers.recording import Recorder


class RolloutSide(Protocol):
    """All rollout replicas, as a trainer mode handles them. Every wait has a deadline (``sync.timeout``).

    Lent replicas live on the trainer's devices; they serve between ``to_rollout`` and ``to_trainer``.
    """

    @property
    def hybrids(self) -> int:
        """How many replicas the trainer's devices can lend; 0 in a layout without."""

    def sync_weights(self, version: int) -> SyncReport:
        """Bring every replica that serves, lent ones too, to ``version``; blocks.

        Some may end fenced: they are in the report, and out of routing until a later sync. Raises SyncError when none
        serves ``version``.
        """

    def abort(self) -> None:
        """End running requests on all replicas and let none run until the next sync; the tokens made so far come to
        the rollouter, which goes on from them."""

    def sleep(self) -> None:
        """Give devices that are shared to the trainer; nothing where rollouts have their own."""

    def to_rollout(self, version: int) -> None:
        """Lend: bring the hybrid replicas to ``version`` (that of the last sync) and let them take requests. Raises
        SyncError when they cannot; the trainer has its devices then."""

    def to_trainer(self) -> None:
        """Take back: no more requests, the running ones end (they go on elsewhere), the memory goes to the trainer."""

    def versions(self) -> Mapping[str, int | None]:
        """Return the version that each replica serves; None while it does not."""


@runtime_checkable
class MeasuredRollouts(Protocol):
    """A ``RolloutSide`` that has figures of its own."""

    def take_figures(self) -> dict[str, float]:
        """Return those of the time since the last call; they take the place of a step's of the same name."""


@dataclass
class Parts:
    """The parts of a run, built once.

    Attributes:
        config: resolved; the mode's defaults are filled in.
        total_steps: steps that the run has in all.
        cursor: position in the data.
        held_out: prompts of an evaluation; empty evaluates nothing.
        rollouts: all replicas.
        stop: set by a signal.
        checkpoints: where checkpoints go.
        algorithm: what the configuration's ``algorithm`` section means for a step.
        reference: scores responses for the KL; None without one.
        critic: says what states are worth; None without one.
        reward_model: says what responses are worth, beside the task; None without one.
        recorder: keeps a record of each step; None without.
    """

    config: Config
    total_steps: int
    cursor: PromptCursor
    held_out: Sequence[Sample]
    buffer: GroupBuffer
    rollouter: Rollouter
    model: ModelEngine
    rollouts: RolloutSide
    events: EventLog
    checkpoints: Checkpoints
    stop: StopSignal
    algorithm: Algorithm
    reference: Reference | None = None
    critic: Critic | None = None
    reward_model: ResponseScorer | None = None
    recorder: Recorder | None = None

    def saved(self) -> dict[str, Stateful]:
        """Return what a checkpoint holds beside the trainer's own state."""
        critic: dict[str, Stateful] = {} if self.critic is None else {"critic": self.critic}
        parts: dict[str, Stateful] = {"model": self.model, "cursor": self.cursor, "buffer": self.buffer}
        return {**parts, "algorithm": self.algorithm, **critic}
