"""Events from which the decisions of a run are made again: what came in, what was decided, and on what.

Each is told where it happens, holding the lock that guards what it is about, so that the order of those of one object
is the true one: of the buffer and what feeds it; of the pool and its balancer; of the message queue.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rlctl.experience.event_base import Event


class ResponseStanding(msgspec.Struct, array_like=True):
    """A response of a group in the buffer.

    Attributes:
        oldest: version of its oldest token; -1 before there is one.
        reward, reason: of one that has ended.
    """

    sample: int
    ended: bool
    oldest: int = -1
    reward: float = 0.0
    reason: str = ""


class GroupStanding(msgspec.Struct, array_like=True):
    """A group in the buffer, with the responses that are under way or have ended."""

    ordinal: int
    dispatched: int
    size: int
    responses: list[ResponseStanding] = []


class ScheduleBegan(Event):
    """The trainer is about to begin, and this is where everything stands.

    Attributes:
        step: trained so far.
        steps: of the whole run.
        ordinal: of the data's next prompt.
        remaining: prompts left in the data; -1 when it has no end.
        selected: groups taken for training so far.
        groups: in the buffer.
        held_out: prompts of a validation.
        hybrids: replicas that can be lent.
        measured: what is known for the switching rule.
        settings: what decisions depend on, by configuration key.
    """

    step: int
    steps: int
    ordinal: int
    remaining: int
    selected: int
    groups: list[GroupStanding] = msgspec.field(default_factory=list)
    held_out: int = 0
    hybrids: int = 0
    measured: dict[str, float] = msgspec.field(default_factory=dict)
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


class Wanted(Event):
    """A local update begins to wait for ``groups`` groups: fewer than it trains, when the data ends."""

    step: int
    round: int
    groups: int


class Admitted(Event):
    """There was room for groups under ``version``, and so many were ``taken`` from the data.

    Attributes:
        by: the ``step``, or the ``loop`` that generates in the background.
    """

    version: int
    room: int
    taken: int
    by: Literal["step", "loop"]


class Retained(Event):
    """A group without signal stays: no other can take its place any more."""

    ordinal: int


class Arrived(Event):
    """Tokens of responses came; ``oldest``: version of each one's oldest token, -1 where it has none."""

    keys: list[tuple[int, int, int]]
    oldest: list[int]


class LoopChanged(Event):
    """What feeds the replicas was paused, resumed, or told the version that generates from now on.

    Attributes:
        version: that generates; -1 before there is one.
        validates: whether held-out prompts are answered meanwhile.
    """

    change: Literal["paused", "resumed", "version"]
    version: int = -1
    why: str = ""
    validates: bool = False


class QueueChanged(Event):
    """The message queue got another parameter version, or a message was put into it under ``version``; or so many
    (``count``) were taken."""

    change: Literal["version", "put", "taken"]
    version: int
    count: int = 1


class SeatChanged(Event):
    """A replica of the pool changed.

    Attributes:
        epoch: of its stay.
        change: ``joined``, ``serving``, ``fenced``, ``leaving`` (it gets no more requests), ``left`` or ``lost``.
    """

    replica: str
    epoch: int
    change: Literal["joined", "serving", "fenced", "leaving", "left", "lost"]


class Recall(Event):
    """What a lost replica had waits again, before all others.

    Attributes:
        epoch: of the replica's stay.
        died: whether it died, perhaps of one of the requests.
        keys: what waits again.
        gained: tokens of each of those that became known with the loss.
        whole: of what it had, responses that are known in full; they have ended.
    """

    epoch: int
    died: bool
    keys: list[tuple[int, int, int]]
    gained: list[int]
    whole: list[tuple[int, int, int]] = msgspec.field(default_factory=list)


class Asked(Event):
    """Requests came to the pool. Ordinals below 0 are those of evaluations."""

    keys: list[tuple[int, int, int]]


class Routed(Event):
    """Requests that waited were given to replicas: ``replicas[i]`` is that of ``keys[i]``.

    Attributes:
        among: the replicas that took requests.
    """

    among: list[str]
    keys: list[tuple[int, int, int]]
    replicas: list[str]


class Landed(Event):
    """Outputs came from a replica; ``late``: of requests that had gone on elsewhere, or were over."""

    replica: str
    epoch: int
    keys: list[tuple[int, int, int]]
    late: list[tuple[int, int, int]] = msgspec.field(default_factory=list)


class Withdrawn(Event):
    """Requests left the pool before a replica had ended them, or wait again, as they were not sent after all."""

    keys: list[tuple[int, int, int]]
    why: Literal["ended", "refused", "unsent"]


class PlacesForgotten(Event):
    """Conversations have nothing in any KV cache any more, and go where the fewest requests are."""


class LendDecided(Event):
    """Before a step waits for its responses: whether the trainer lends its devices, and on what that was decided."""

    step: int
    lend: bool
    why: str
    gain: float
    inputs: dict[str, float] = msgspec.field(default_factory=dict)


class RateMeasured(Event):
    """A step was trained, and ``finished`` groups were ready since the last one, in ``seconds`` of generation; this
    counts when the replicas of the rollout side generated alone."""

    step: int
    finished: int
    seconds: float
    alone: bool


ScheduleEvent = (
    ScheduleBegan | Wanted | Admitted | Retained | Arrived | LoopChanged | QueueChanged | SeatChanged | Asked | Routed
    | Recall | Landed | Withdrawn | PlacesForgotten | LendDecided | RateMeasured
)  # fmt: skip
