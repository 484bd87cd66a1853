"""The schema of everything that happens in a run. One line of ``events.jsonl`` each; metrics, replay and tests read it.

Fields that every event has: ``seq`` (its number in the file, from 0), ``time`` (seconds since the epoch; never used
for a decision that must be told again), ``attempt`` (which start of the run wrote it).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rlctl.experience.event_base import Event
from rlctl.experience.figures import Figure, figures_in
from rlctl.experience.schedule_events import ScheduleEvent

__all__ = ["AnyEvent", "Event"]

SCHEMA = 1
"""Of the events that are written. It rises when the same schedule is told otherwise: see ``RunStarted``."""


class RunStarted(Event):
    """An attempt begins. ``from_step`` and ``from_seq`` say which lines of earlier attempts it builds on: those with a
    higher ``seq`` belong to work that was lost and done again. ``schema``: what its events mean; 0 before they said."""

    mode: str
    seed: int
    from_step: int = 0
    from_seq: int = -1
    schema: int = 0


class RunEnded(Event):
    """An attempt ends: done, failed, preempted or interrupted."""

    step: int
    status: Literal["done", "failed", "preempted", "interrupted"]
    error: str = ""


class Dispatched(Event):
    """A prompt was submitted for generation under ``version``; ``task`` names its task among several."""

    ordinal: int
    row: int
    samples: int
    version: int
    task: str = ""


class SegmentMade(Event):
    """Tokens of one response under one version, on one replica; or an observation after the model's turn ``turn``."""

    ordinal: int
    sample: int
    turn: int
    index: int
    tokens: int
    version: int
    replica: str
    observation: bool = False


class Finished(Event):
    """A response reached its end and was scored; ``tokens`` counts what the model made in all its turns."""

    ordinal: int
    sample: int
    tokens: int
    reason: str
    reward: float
    failed: str = ""
    turns: int = 1


class GroupEnded(Event):
    """All responses of a prompt are there, or the group failed."""

    ordinal: int
    status: Literal["finished", "failed"]


class Aborted(Event):
    """Running requests were interrupted. Of their tokens ``kept`` go on, and ``lost`` are made again."""

    keys: list[tuple[int, int, int]]
    why: str
    kept: int = 0
    lost: int = 0


class Selected(Event):
    """Groups were taken from the buffer for a step; ``ages``: of each, in versions, by its oldest token."""

    step: int
    ordinals: list[int]
    ages: list[int] = msgspec.field(default_factory=list)


class Scored(Event):
    """The reward model scored a train batch: by response, the task's reward, its score, and the reward they make."""

    step: int
    seconds: float
    keys: list[tuple[int, int, int]]
    task: list[float]
    scores: list[float]
    rewards: list[float]


class Evicted(Event):
    """A group left the buffer without being trained."""

    ordinal: int
    why: str
    age: int = 0


class Switched(Event):
    """Devices changed between generation and training."""

    step: int
    to: Literal["rollout", "trainer"]
    inputs: dict[str, float] = msgspec.field(default_factory=dict)


class SyncPhase(Event):
    """One edge of a weight sync. ``loop``: of the loop beside the trainer, and not of the transfer itself."""

    version: int
    phase: str
    seconds: float = 0.0
    error: str = ""
    loop: bool = False


class SyncEnded(Event):
    """A weight sync reached a legal end. ``kept``: bytes of it that the fullest device keeps while it trains."""

    version: int
    status: Literal["committed", "rolled_back", "fenced", "failed"]
    loaded: int = 0
    bytes: int = 0
    seconds: float = 0.0
    fenced: list[str] = msgspec.field(default_factory=list)
    kept: int = 0


class ReplicaChanged(Event):
    """A replica joined, left, slept, woke or died."""

    replica: str
    change: Literal["joined", "left", "slept", "woke", "died", "restarted"]
    version: int = -1


class Hook(Event):
    """A trainer hook ran."""

    name: str
    step: int
    error: str = ""


class Stage(Event):
    """A stage of the step ran."""

    name: str
    step: int
    seconds: float = 0.0
    error: str = ""


class StepEnded(Event):
    """A step was trained; ``version`` is the weights' version after it, ``metrics`` its figures as JSON has them."""

    step: int
    version: int
    metrics: dict[str, Figure]

    @property
    def figures(self) -> dict[str, float]:
        """The metrics as numbers."""
        return figures_in(self.metrics)


class Validated(Event):
    """Held-out prompts were answered greedily."""

    step: int
    accuracy: float
    by_label: dict[str, float] = msgspec.field(default_factory=dict)
    prompts: int = 0


class Checkpointed(Event):
    """A checkpoint was published."""

    step: int
    name: str
    seconds: float = 0.0


class Signalled(Event):
    """A signal asked for a stop."""

    name: str
    step: int


class Noted(Event):
    """Something a person should know."""

    message: str
    data: dict[str, Any] = msgspec.field(default_factory=dict)


AnyEvent = (
    RunStarted | RunEnded | Dispatched | SegmentMade | Finished | GroupEnded | Aborted | Selected | Scored | Evicted
    | Switched | SyncPhase | SyncEnded | ReplicaChanged | Hook | Stage | StepEnded | Validated | Checkpointed
    | Signalled | Noted | ScheduleEvent
)  # fmt: skip
