"""Events that must come next, once something was decided that they tell."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from rlctl.experience.event_base import Event


class DisagreementError(Exception):
    """What was recorded is not what is decided here.

    Attributes:
        seq: number of the event.
        stage: what it is about.
        said: what was expected, and what was found.
    """

    def __init__(self, event: Event, stage: str, said: str) -> None:
        super().__init__(f"event {event.seq} ({name_of(type(event))}): {said}")
        self.seq, self.stage, self.said = event.seq, stage, said


def name_of(kind: type[Event]) -> str:
    """Return the name that a kind of event has in the log."""
    return str(kind.__struct_config__.tag)


def require(holds: bool, event: Event, stage: str, said: str) -> None:
    """Raise DisagreementError unless something holds."""
    if not holds:
        raise DisagreementError(event, stage, said)


class Due(NamedTuple):
    """An event that must come, and what it must say."""

    stage: str
    kind: type[Event]
    fields: dict[str, Any]

    def require(self, event: Event) -> None:
        """Raise DisagreementError when ``event`` is another one."""
        if not isinstance(event, self.kind):
            said = f"here {name_of(self.kind)} ({_said(self.fields)}) must come"
            raise DisagreementError(event, self.stage, said)
        for name, value in self.fields.items():
            found = getattr(event, name)
            if found != value:
                raise DisagreementError(event, self.stage, f"{name} is {found}, and {value} comes out here")


class Expected:
    """What must come next, in order."""

    def __init__(self) -> None:
        self._due: deque[Due] = deque()

    def add(self, stage: str, kind: type[Event], **fields: Any) -> None:
        """``kind`` must come, with these fields."""
        self._due.append(Due(stage, kind, fields))

    def met_by(self, event: Event) -> bool:
        """Whether ``event`` was due; raises DisagreementError when another one is."""
        if not self._due:
            return False
        self._due.popleft().require(event)
        return True


def _said(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())
