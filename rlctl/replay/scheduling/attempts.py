"""The starts of a run, out of one event log: which events each of them told, and what it went on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rlctl.experience.event_base import Event
from rlctl.experience.events import RunStarted
from rlctl.experience.schedule_events import ScheduleBegan
from rlctl.replay.scheduling.expecting import DisagreementError


@dataclass
class Attempt:
    """One start of a run.

    Attributes:
        number: of the attempt.
        from_seq: the last event that it builds on; -1 for none.
        events: that it told, in order.
    """

    number: int
    from_seq: int = -1
    events: list[Event] = field(default_factory=list)

    @property
    def began(self) -> ScheduleBegan | None:
        """Where it stood; None in a log of an older version."""
        return next((event for event in self.events if isinstance(event, ScheduleBegan)), None)


def attempts_of(events: Sequence[Event]) -> list[Attempt]:
    """Return the starts of a run."""
    attempts: list[Attempt] = []
    for event in events:
        if not attempts or event.attempt != attempts[-1].number:
            attempts.append(Attempt(event.attempt))
        if isinstance(event, RunStarted):
            attempts[-1].from_seq = event.from_seq
        attempts[-1].events.append(event)
    return attempts


def numbered(attempt: Attempt) -> Iterator[Event]:
    """Yield the events of an attempt. Raises DisagreementError where one is missing or out of its place."""
    last = attempt.events[0].seq - 1
    for event in attempt.events:
        if event.seq > last + 1:
            missing = f"event {last + 1} is" if event.seq == last + 2 else f"events {last + 1} to {event.seq - 1} are"
            raise DisagreementError(event, "record", f"{missing} missing before it")
        if event.seq <= last:
            raise DisagreementError(event, "record", f"it comes after event {last}")
        last = event.seq
        yield event


def require_joined(attempts: Sequence[Attempt]) -> None:
    """Raise DisagreementError where an attempt does not go on where the one before it ended. A line that was cut when
    that one was killed has a number too."""
    for before, after in pairwise(attempts):
        first, last = after.events[0], before.events[-1]
        if not last.seq < first.seq <= last.seq + 2:
            raise DisagreementError(first, "record", f"the attempt before it ended with event {last.seq}")
