"""What a replica's process and the driver say to each other, after the ReplicaSetup."""

from __future__ import annotations

from typing import Any

import msgspec

from rlctl.rollout.base import Output, Request
from rlctl.rollout.under_way import Made
from rlctl.sync.error_data import ErrorData


class Submit(msgspec.Struct, array_like=True, tag=1):
    """Requests to take; not answered."""

    requests: list[Request]


class Fence(msgspec.Struct, array_like=True, tag=2):
    """See ServedReplica; not answered, and void when a ``resume`` of a higher number came first."""

    number: int
    reason: str


class Command(msgspec.Struct, array_like=True, tag=3):
    """A call of a method, within so many seconds."""

    number: int
    name: str
    arguments: dict[str, Any]
    seconds: float


class Answer(msgspec.Struct, array_like=True, tag=1):
    """The answer to a command; to number 0, once the process is ready: the number of its loaders."""

    number: int
    result: Any = None
    error: ErrorData | None = None


class Ended(msgspec.Struct, array_like=True, tag=2):
    """Responses that ended."""

    outputs: list[Output]


class Progress(msgspec.Struct, array_like=True, tag=3):
    """What has been made of responses that go on."""

    news: list[Made]


class Alive(msgspec.Struct, array_like=True, tag=4):
    """Said when nothing else has been for a while."""


class Failed(msgspec.Struct, array_like=True, tag=5):
    """It cannot go on."""

    error: ErrorData


ORDER: Any = Submit | Fence | Command
SAID: Any = Answer | Ended | Progress | Alive | Failed
Order = Submit | Fence | Command
Said = Answer | Ended | Progress | Alive | Failed
