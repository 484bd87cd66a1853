"""The prompts of recorded responses as a task, in their own order, and the responses as conversations that are over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from rlctl.errors import UsageError
from rlctl.experience.groups import Response
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, SamplingParams
from rlctl.rollout.conversations import Conversations
from rlctl.rollout.recorded.trajectories import NAME, Group, Trajectory
from rlctl.tasks.base import Sample, Task, TaskOptions
from rlctl.tasks.cursor import PromptCursor


class RecordedTask(Task):
    """Prompts whose responses are there already; what these earned was recorded with them."""

    name = NAME

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        digest = blake2b(digest_size=16)
        for group in groups:
            for ids in (group.prompt_ids, *(trajectory.token_ids for trajectory in group.trajectories)):
                digest.update(len(ids).to_bytes(8, "little") + np.asarray(ids, np.int64).tobytes())
        self.digest = digest.hexdigest()

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> Task:
        """Refuse: it is made of groups."""
        raise UsageError(
            f"task {name!r} comes with rollout.engine=recorded:PATH (options {options})", where="task.name"
        )

    @property
    def size(self) -> int:
        return len(self._groups)

    def sample(self, index: int) -> Sample:
        group = self._groups[index]
        return Sample(
            index, "", "", group.label, source=group.place, task=group.task, token_ids=tuple(group.prompt_ids)
        )

    def held_out(self, n: int) -> list[Sample]:
        return []

    def score(self, sample: Sample, response_text: str) -> float:
        raise AssertionError("what a recorded response earned is recorded")


class RecordedCursor(PromptCursor):
    """Hands out recorded prompts as they stand, epoch after epoch."""

    def __init__(self, task: RecordedTask, seed: int, epochs: int | None) -> None:
        super().__init__(task, seed, epochs or 1)
        self._recorded = task

    def at(self, ordinal: int) -> Sample:
        return self._recorded.sample(ordinal % self._recorded.size)


class RecordedConversations(Conversations):
    """Ends recorded responses with what they earned; others are judged as ever."""

    def __init__(self, groups: Sequence[Group], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._groups = groups

    def advance(
        self, ended: Sequence[tuple[Sample, Response | None, Output]], params: SamplingParams
    ) -> list[Response]:
        """See ``Conversations``."""
        others = iter(super().advance([one for one in ended if one[2].key.ordinal < 0], params))
        return [
            next(others) if output.key.ordinal < 0 else _whole(trajectory_of(self._groups, output.key), output.key)
            for _, _, output in ended
        ]


def trajectory_of(groups: Sequence[Group], key: RequestKey) -> Trajectory:
    """Return the recorded response to a request for training."""
    return groups[key.ordinal % len(groups)].trajectories[key.sample]


def _whole(trajectory: Trajectory, key: RequestKey) -> Response:
    return Response(
        key=key._replace(turn=trajectory.segments[-1].turn),
        segments=[replace(segment) for segment in trajectory.segments],
        finish_reason=trajectory.finish_reason,
        reward=trajectory.reward,
        observations=list(trajectory.observations),
    )
