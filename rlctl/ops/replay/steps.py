"""The steps of a run and their samples, as its events tell them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlctl.experience.events import (
    Dispatched,
    Event,
    Finished,
    Hook,
    RunEnded,
    SegmentMade,
    Selected,
    Stage,
    StepEnded,
)
from rlctl.experience.records.manifest import Failure
from rlctl.experience.records.reading import Bundle


@dataclass(frozen=True)
class Piece:
    """Tokens of a response that were made in one go.

    Attributes:
        tokens: how many.
        version: of the weights that made them.
        replica: where.
        turn: of the conversation.
        observation: whether the task said them.
        begin, end: seconds since the epoch; from the prompt's dispatch, or from the piece before it.
    """

    tokens: int
    version: int
    replica: str
    turn: int
    observation: bool
    begin: float
    end: float


@dataclass
class Told:
    """A response, as events tell it.

    Attributes:
        ordinal, sample: which.
        task: name of its task among several.
        pieces: its tokens, in order.
        tokens: that the model made, None while it is under way.
        reward: of the task, None while it is under way.
        reason: why it ended.
        failed: why its reward could not be found.
        turns: of its conversation.
    """

    ordinal: int
    sample: int
    task: str = ""
    pieces: list[Piece] = field(default_factory=list)
    tokens: int | None = None
    reward: float | None = None
    reason: str = ""
    failed: str = ""
    turns: int = 1


@dataclass
class TrainedStep:
    """A step of the trainer.

    Attributes:
        step: its number.
        version: of the weights after it; None while it has not ended, and of one that failed.
        attempt: which start of the run made it.
        ordinals: prompts that it trained, in order of selection.
        ages: of each, in versions.
        samples: the responses of those.
        stages: name -> seconds.
        metrics: of the step, as far as there are any.
        failure: why it has no end.
    """

    step: int
    version: int | None = None
    attempt: int = 0
    ordinals: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    samples: list[Told] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None

    def recorded(self, bundle: Bundle) -> None:
        """Take from its record what no event tells."""
        manifest = bundle.manifest
        self.failure = manifest.failure or self.failure
        self.attempt, self.metrics = manifest.attempt, self.metrics or bundle.metrics
        self.version = manifest.version if manifest.failure is None else None
        self.ordinals = self.ordinals or [group.ordinal for one in bundle.rounds for group in one.groups]


def responses_of(events: Iterable[Event]) -> dict[tuple[int, int], Told]:
    """Return every response that was begun, by ordinal and sample."""
    dispatched: dict[int, Dispatched] = {}
    found: dict[tuple[int, int], Told] = {}
    for event in events:
        if isinstance(event, Dispatched):
            dispatched[event.ordinal] = event
        elif isinstance(event, SegmentMade | Finished):
            key = (event.ordinal, event.sample)
            prompt = dispatched.get(event.ordinal)
            told = found.setdefault(key, Told(*key, task=prompt.task if prompt else ""))
            if isinstance(event, Finished):
                told.tokens, told.reward, told.reason = event.tokens, event.reward, event.reason
                told.failed, told.turns = event.failed, event.turns
                continue
            begin = told.pieces[-1].end if told.pieces else prompt.time if prompt else event.time
            told.pieces.append(
                Piece(
                    event.tokens, event.version, event.replica, event.turn, event.observation, min(begin, event.time),
                    event.time,
                )
            )  # fmt: skip
    return found


def begun_steps(events: Iterable[Event]) -> dict[int, TrainedStep]:
    """Return the steps that began, in order."""
    events = list(events)
    responses = responses_of(events)
    by_ordinal: dict[int, list[Told]] = {}
    for key in sorted(responses):
        by_ordinal.setdefault(key[0], []).append(responses[key])
    steps: dict[int, TrainedStep] = {}
    for event in events:
        if isinstance(event, Selected | Stage | StepEnded):
            step = steps.setdefault(event.step, TrainedStep(event.step, attempt=event.attempt))
            if isinstance(event, Selected):
                step.ordinals += event.ordinals
                step.ages += event.ages
            elif isinstance(event, Stage):
                step.stages[event.name] = step.stages.get(event.name, 0.0) + event.seconds
            else:
                step.version, step.metrics, step.attempt = event.version, event.figures, event.attempt
    for step in steps.values():
        step.samples = [told for ordinal in step.ordinals for told in by_ordinal.get(ordinal, [])]
    if steps and (last := steps[max(steps)]).version is None:
        last.failure = _failure(last.step, events)
    return {number: steps[number] for number in sorted(steps)}


def _failure(step: int, events: list[Event]) -> Failure | None:
    """Return why the last step of a run has no end; None where no error ended the run, or it is under way."""
    end = events[-1]
    if not isinstance(end, RunEnded) or end.status != "failed":
        return None
    first = next(i for i, event in enumerate(events) if isinstance(event, Selected | Stage) and event.step == step)
    rounds: dict[str, int] = {}
    for event in events[first:]:
        if isinstance(event, Stage | Hook) and event.error:
            message, _, _ = event.error.partition("\n")
            return Failure(event.name, rounds.get(event.name, 0), message)
        if isinstance(event, Stage):
            rounds[event.name] = rounds.get(event.name, 0) + 1
    return None
