"""Requests with nothing left to make: their prefix is a whole response already."""

from __future__ import annotations

from rlctl.experience.segments import FinishReason
from rlctl.rollout.base import Request


def ended_before(request: Request) -> FinishReason | None:
    """Return how the response ended that ``request`` continues, None when there are tokens to make."""
    made = sum(len(segment.token_ids) for segment in request.prefix)
    if not made:
        return None
    if request.prefix[-1].token_ids[-1] in request.params.stop_token_ids:
        return "stop"
    return "length" if made >= request.params.max_new_tokens else None
