"""Groups in a buffer as the event log has them: what admission and selection ask of them, without their tokens."""

from __future__ import annotations

from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.groups import PromptGroup, Response
from rlctl.experience.schedule_events import GroupStanding, ResponseStanding
from rlctl.experience.segments import FinishReason, RequestKey, Segment


def oldest_of(response: Response) -> int:
    """Return the version of a response's oldest token; -1 where it has none."""
    return min((segment.version for segment in response.segments if segment.token_ids), default=-1)


def stand_in(key: RequestKey, oldest: int, reason: FinishReason = "abort", reward: float | None = None) -> Response:
    """Return a response with one token, of version ``oldest``, in the place of all that there are; with none for -1."""
    segments = [Segment([0], [0.0], oldest)] if oldest >= 0 else []
    return Response(key, segments, reason, reward)


def standing_of(buffer: GroupBuffer) -> list[GroupStanding]:
    """Return how the groups of a buffer stand, by ordinal."""
    with buffer.changed:
        groups = sorted([*buffer.finished(), *buffer.unfinished()], key=lambda group: group.ordinal)
        return [_standing(group) for group in groups]


def stood(standing: GroupStanding) -> PromptGroup:
    """Return a group that stands so."""
    group = PromptGroup(standing.ordinal, 0, "", [], standing.size, standing.dispatched)
    for one in standing.responses:
        key = RequestKey(standing.ordinal, one.sample)
        if one.ended:
            group.add(stand_in(key, one.oldest, "length" if one.reason == "length" else "stop", one.reward))
        else:
            group.goes_on(stand_in(key, one.oldest))
    return group


def _standing(group: PromptGroup) -> GroupStanding:
    responses = [
        ResponseStanding(sample, True, oldest_of(response), response.reward or 0.0, response.finish_reason)
        for sample, response in group.responses.items()
    ]
    responses += [ResponseStanding(sample, False, oldest_of(r)) for sample, r in group.under_way.items()]
    responses.sort(key=lambda response: response.sample)
    return GroupStanding(group.ordinal, group.dispatched, group.size, responses)
