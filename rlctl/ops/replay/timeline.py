"""When the trainer and each replica did what, from a run's events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from rlctl.experience.events import (
    Checkpointed,
    Event,
    ReplicaChanged,
    RunStarted,
    Signalled,
    Stage,
    StepEnded,
    SyncEnded,
    Validated,
)
from rlctl.experience.records.manifest import Failure
from rlctl.ops.replay.steps import responses_of

TRAINER, SYNC = "trainer", "weight sync"


@dataclass(frozen=True)
class Span:
    """Something that lasted.

    Attributes:
        begin, end: seconds since the epoch.
        what: name of a stage; of a replica, ``version N``.
        step: that it belongs to, None for none.
        version: of weights, None for none.
        tokens: that were made in it.
    """

    begin: float
    end: float
    what: str
    step: int | None = None
    version: int | None = None
    tokens: int = 0


@dataclass
class Lane:
    """One line of the picture."""

    name: str
    spans: list[Span] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """Seconds that its spans cover."""
        covered, until = 0.0, float("-inf")
        for span in sorted(self.spans, key=lambda span: span.begin):
            covered += max(0.0, span.end - max(span.begin, until))
            until = max(until, span.end)
        return covered


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment."""

    time: float
    what: str


@dataclass(frozen=True)
class Timeline:
    """Lanes and marks between two moments (seconds since the epoch).

    ``ends``: step -> when it ended, or failed.
    """

    begin: float
    end: float
    lanes: Sequence[Lane]
    marks: Sequence[Mark]
    ends: dict[int, float]

    @property
    def seconds(self) -> float:
        """How long it is."""
        return max(self.end - self.begin, 1e-9)


def timeline(
    events: Sequence[Event],
    first: int | None = None,
    last: int | None = None,
    *,
    since: float = math.inf,
    failed: Mapping[int, Failure] = MappingProxyType({}),
) -> Timeline:
    """Return the timeline of a run, or of its steps ``first`` to ``last``: from the end of the step before them, or the
    start of the attempt that goes on from there, or from ``since`` where that is earlier. ``failed``: why steps
    have no end."""
    ends = {event.step: event.time for event in events if isinstance(event, Stage) and event.step in failed}
    ends |= {event.step: event.time for event in events if isinstance(event, StepEnded)}
    times = [event.time for event in events]
    before = [time for step, time in ends.items() if first is not None and step == first - 1]
    before += [e.time for e in events if before and isinstance(e, RunStarted) and e.from_step + 1 == first]
    begin = min([max(before), since] if before else times, default=0.0)
    end = max((t for step, t in ends.items() if last is not None and step <= last), default=max(times, default=0.0))
    lanes = [_trainer(events), _syncs(events), *_replicas(events)]
    for lane in lanes:
        lane.spans = [s for s in lane.spans if s.end > begin and s.begin < end]
    whys = [Mark(ends[step], f"step {step} failed: {why.message}") for step, why in failed.items() if step in ends]
    marks = [mark for mark in [*_marks(events), *whys] if begin <= mark.time <= end]
    shown = {step: time for step, time in ends.items() if begin < time <= end}
    return Timeline(begin, end, [lane for lane in lanes if lane.spans or lane.name == TRAINER], marks, shown)


def _trainer(events: Iterable[Event]) -> Lane:
    spans = [
        Span(event.time - event.seconds, event.time, event.name, event.step)
        for event in events
        if isinstance(event, Stage)
    ]
    return Lane(TRAINER, spans)


def _syncs(events: Iterable[Event]) -> Lane:
    spans = [
        Span(event.time - event.seconds, event.time, f"{event.status}, version {event.version}", version=event.version)
        for event in events
        if isinstance(event, SyncEnded)
    ]
    return Lane(SYNC, spans)


def _replicas(events: Iterable[Event]) -> list[Lane]:
    by_replica: dict[str, list[Span]] = {}
    for told in responses_of(events).values():
        for piece in told.pieces:
            if not piece.observation:
                span = Span(piece.begin, piece.end, f"version {piece.version}", None, piece.version, piece.tokens)
                by_replica.setdefault(piece.replica, []).append(span)
    return [Lane(f"replica {name}", _merged(by_replica[name])) for name in sorted(by_replica)]


def _merged(spans: list[Span]) -> list[Span]:
    """Return spans of one version that touch as one."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.version or 0, span.begin)):
        before = merged[-1] if merged else None
        if before is not None and before.version == span.version and span.begin <= before.end:
            end, tokens = max(before.end, span.end), before.tokens + span.tokens
            merged[-1] = Span(before.begin, end, span.what, None, span.version, tokens)
        else:
            merged.append(span)
    return merged


def _marks(events: Iterable[Event]) -> Iterable[Mark]:
    for event in events:
        if isinstance(event, RunStarted):
            resumed = f" from step {event.from_step}" if event.from_step else ""
            yield Mark(event.time, f"attempt {event.attempt}{resumed}")
        elif isinstance(event, Checkpointed):
            yield Mark(event.time, f"checkpoint {event.name}")
        elif isinstance(event, Validated):
            yield Mark(event.time, f"held-out accuracy {event.accuracy:.3f} after step {event.step}")
        elif isinstance(event, ReplicaChanged):
            yield Mark(event.time, f"replica {event.replica} {event.change}")
        elif isinstance(event, Signalled):
            yield Mark(event.time, event.name)
