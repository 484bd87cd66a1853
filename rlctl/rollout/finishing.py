"""Stepping an engine until certain requests have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request


def outputs_of(requests: Sequence[Request], step: Callable[[], Iterable[Output]]) -> tuple[list[Output], list[Output]]:
    """Return the outputs of ``requests``, in their order, and those of others that ``step`` gave meanwhile."""
    wanted = {request.key for request in requests}
    mine: dict[RequestKey, Output] = {}
    others: list[Output] = []
    while len(mine) < len(wanted):
        for output in step():
            if output.key in wanted:
                mine[output.key] = output
            else:
                others.append(output)
    return [mine[request.key] for request in requests], others
