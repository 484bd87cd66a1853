"""The rollout engine of a run whose responses are there already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.rollout.recorded.prompts import trajectory_of
from rlctl.rollout.recorded.trajectories import Group


class RecordedEngine(EmbeddedEngine):
    """Answers requests for training with recorded responses, and held-out prompts, whose ordinals are negative, with
    the model's own. Weights are synced as into any engine, for the latter."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._groups: Sequence[Group] = ()
        self._asked: dict[RequestKey, Request] = {}

    def serve(self, groups: Sequence[Group]) -> None:
        """Take the responses that requests for training are answered with."""
        self._groups = groups

    @property
    def num_running(self) -> int:
        return super().num_running + len(self._asked)

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([request for request in requests if request.key.ordinal < 0])
        self._asked |= {request.key: request for request in requests if request.key.ordinal >= 0}

    def step(self) -> list[Output]:
        made = super().step()
        asked, self._asked = self._asked, {}
        for key in asked:
            trajectory = trajectory_of(self._groups, key)
            made.append(Output(key, list(trajectory.segments), trajectory.finish_reason))
        return made

    def abort(self, keys: Iterable[RequestKey] | None = None) -> list[Output]:
        named = None if keys is None else set(keys)
        ended = [key for key in self._asked if named is None or key in named]
        for key in ended:
            del self._asked[key]
        return [*super().abort(named), *(Output(key, [], "abort") for key in ended)]
